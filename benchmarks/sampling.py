"""What does one verify cost under each transform? Ours against transformers' own processors.

K + 1 = 6 positions are judged, all of them accepted: the coupled rule draws the target's token at
each, the rule of rejection makes p and judges a draft with model q by it, over transformers'
processors as well. In milliseconds, medians of interleaved runs. `flat` logits have a nucleus of
half the vocabulary, as random models do; `peaked` ones look like a trained model's.

    python -m benchmarks.sampling [--vocab 151936] [--runs 30] [--json]
"""

import argparse
import json
import time
from statistics import median
from typing import Any

import torch
from tqdm import tqdm
from transformers.generation import logits_process

from benchmarks import core
from serving.options import between

CASES = {
    "greedy": core.Sampling(),
    "temperature": core.Sampling(temperature=0.8),
    "top_k 40": core.Sampling(temperature=0.8, top_k=40),
    "top_p 0.9": core.Sampling(temperature=0.8, top_p=0.9),
    "top_k 40 + top_p 0.9": core.Sampling(temperature=0.8, top_k=40, top_p=0.9),
    "min_p 0.05": core.Sampling(temperature=0.8, min_p=0.05),
    "repetition_penalty 1.1": core.Sampling(repetition_penalty=1.1, temperature=0.8),
    "all": core.Sampling(1.1, 0.8, 40, 0.9, 0.05),
}
N = 5  # drafted tokens, judged at N + 1 positions
TEXT = 1000  # tokens of context that the repetition penalty reads
NOISE = core.Noise(0)


def coupled(logits: torch.Tensor, text: list[int], draft: Any, sampling: Any) -> None:
    scores = core.penalise(logits, sampling.repetition_penalty, text, draft.tokens)
    list(core.own_choices(scores, sampling, NOISE, TEXT))


def rejection(logits: torch.Tensor, text: list[int], draft: Any, sampling: Any) -> None:
    scores = core.penalise(logits, sampling.repetition_penalty, text, draft.tokens)
    core.verify_by_rejection(draft, core.probabilities(scores, sampling), NOISE, TEXT)


def processors(sampling: Any) -> logits_process.LogitsProcessorList:
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


def theirs(logits: torch.Tensor, text: list[int], draft: Any, sampling: Any) -> None:
    """Rejection with transformers' processors: they take all positions, read ids row by row."""
    if sampling.is_greedy:
        logits.argmax(-1).tolist()
        return
    ids = torch.tensor(text).expand(len(logits), -1)
    p = processors(sampling)(ids, logits).softmax(-1)
    core.verify_by_rejection(draft, p, NOISE, TEXT)


def measure(vocab: int, runs: int) -> list[dict[str, Any]]:
    """One row per shape of the logits and case: medians of both in ms."""
    torch.manual_seed(0)
    text = torch.randint(0, vocab, (TEXT,)).tolist()
    rows = []
    for shape, spread in tqdm({"peaked": 8.0, "flat": 1.0}.items(), desc="shapes"):
        logits = torch.randn(N + 1, vocab) * spread
        q = (logits[:N] + torch.randn(N, vocab)).softmax(-1)
        draft = core.Draft([core.draw(row, 0.5) for row in q], q)
        for name, sampling in CASES.items():
            times: dict[Any, list[float]] = {coupled: [], rejection: [], theirs: []}
            for run in range(-2, runs):
                for method, measured in times.items():
                    began = time.perf_counter()
                    method(logits, text, draft, sampling)
                    if run >= 0:  # the first two warm up
                        measured.append((time.perf_counter() - began) * 1e3)
            rows.append(
                {
                    "logits": shape,
                    "case": name,
                    "coupled_ms": round(median(times[coupled]), 3),
                    "rejection_ms": round(median(times[rejection]), 3),
                    "transformers_ms": round(median(times[theirs]), 3),
                }
            )
    return rows


def main() -> None:
    """Run the command line: a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    count = between(64, 10**6)
    parser.add_argument("--vocab", type=count, default=151_936, help="(default: %(default)s)")
    parser.add_argument("--runs", type=between(1, 999), default=30, help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    given = parser.parse_args()
    rows = measure(given.vocab, given.runs)
    if not given.json:
        print(f"{'logits':8}{'case':26}{'coupled':>9}{'rejection':>11}{'transformers':>14}, ms")
        for row in rows:
            print(
                f"{row['logits']:8}{row['case']:26}{row['coupled_ms']:9.2f}"
                f"{row['rejection_ms']:11.2f}{row['transformers_ms']:14.2f}"
            )
    document = {"vocab": given.vocab, "positions": N + 1, "threads": torch.get_num_threads()}
    print(json.dumps(document | {"torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
