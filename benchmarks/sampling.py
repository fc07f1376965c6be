"""What does one verify cost under each transform? Ours against transformers' own processors.

K + 1 = 6 positions are judged, all of them accepted. The coupled rule draws the target's token at
each. The rule of rejection makes p and judges a draft with model q by it, over transformers'
processors as well. In milliseconds, medians of interleaved runs. `flat` logits have a nucleus of
half the vocabulary, as random models do; `peaked` ones look like a trained model's.

    python -m benchmarks.sampling [--vocab 151936] [--runs 30] [--json]
"""

from typing import Any

import torch
from transformers.generation import logits_process

import benchmarks as bench
from benchmarks import core
from messages import Draft, Sampling

CASES = {
    "temperature": Sampling(temperature=0.8),
    "top_k 40": Sampling(temperature=0.8, top_k=40),
    "top_p 0.9": Sampling(temperature=0.8, top_p=0.9),
    "top_k 40 + top_p 0.9": Sampling(temperature=0.8, top_k=40, top_p=0.9),
    "min_p 0.05": Sampling(temperature=0.8, min_p=0.05),
    "repetition_penalty 1.1": Sampling(repetition_penalty=1.1, temperature=0.8),
    "all": Sampling(1.1, 0.8, 40, 0.9, 0.05),
}
N = 5  # drafted tokens, judged at N + 1 positions
TEXT = 1000  # tokens of context that the repetition penalty reads


def processors(sampling: Sampling) -> logits_process.LogitsProcessorList:
    """What transformers' generate() applies for a sampling that is not greedy, in its order."""
    chosen = logits_process.LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        chosen.append(logits_process.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    chosen.append(logits_process.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        chosen.append(logits_process.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chosen.append(logits_process.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chosen.append(logits_process.MinPLogitsWarper(sampling.min_p))
    return chosen


def measure(vocab: int, runs: int) -> list[dict[str, Any]]:
    """One row per shape of the logits and case: medians in ms."""
    torch.manual_seed(0)
    text, noise = bench.random_tokens(vocab, TEXT), core.Noise(0)
    ids = torch.tensor(text).expand(N + 1, -1)

    def judge(rule: str, logits: torch.Tensor, draft: Draft, sampling: Sampling) -> None:
        if rule == "transformers":
            p = processors(sampling)(ids, logits).softmax(-1)
        else:
            scores = core.penalise(logits, sampling.repetition_penalty, text, draft.tokens)
            if rule == "coupled":
                list(core.own_choices(scores, sampling, noise, TEXT))
                return
            p = core.probabilities(scores, sampling)
        core.verify_by_rejection(draft, p, noise, TEXT)

    methods, rules = {}, ("coupled", "rejection", "transformers")
    for shape, spread in {"peaked": 8.0, "flat": 1.0}.items():
        logits = torch.randn(N + 1, vocab) * spread
        q = (logits[:N] + torch.randn(N, vocab)).softmax(-1)
        draft = Draft([core.draw(row, 0.5) for row in q], q)
        for name, sampling in CASES.items():
            for rule in rules:
                given = rule, logits, draft, sampling
                methods[shape, name, rule] = lambda given=given: judge(*given)
    timed = bench.interleave(methods, runs, "verify")
    return [
        {"logits": shape, "case": name}
        | {f"{rule}_ms": round(bench.median_ms(timed[shape, name, rule]), 3) for rule in rules}
        for shape, name in dict.fromkeys(key[:2] for key in methods)
    ]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__, runs=30)
    bench.add_count(options, "--vocab", 64, 10**6, 151_936, "tokens")
    given = options.parse_args(arguments)
    results = {"positions": N + 1, "rows": measure(given.vocab, given.runs)}
    bench.report(__spec__.name, arguments, given, results, ["rows"])


if __name__ == "__main__":
    main()
