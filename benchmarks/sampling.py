"""What does one verify cost under each transform? Ours against transformers' own processors.

p of K + 1 = 6 positions from logits, then the acceptance rule over a draft with model q; in
milliseconds, medians of interleaved runs. `flat` logits have a nucleus of half the vocabulary, as
random models do; `peaked` ones look like a trained model's.

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


def ours(logits: torch.Tensor, text: list[int], draft: Any, sampling: Any, rng: Any) -> None:
    scores = core.penalise(logits, sampling.repetition_penalty, text, draft.tokens)
    core.verify(draft, core.probabilities(scores, sampling), rng)


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


def theirs(logits: torch.Tensor, text: list[int], draft: Any, sampling: Any, rng: Any) -> None:
    """The same with transformers' processors: they take all positions, read ids row by row."""
    if sampling.is_greedy:
        logits.argmax(-1).tolist()
        return
    ids = torch.tensor(text).expand(len(logits), -1)
    core.verify(draft, processors(sampling)(ids, logits).softmax(-1), rng)


def measure(vocab: int, runs: int) -> list[dict[str, Any]]:
    """One row per shape of the logits and case: medians of both in ms."""
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(0)
    text = torch.randint(0, vocab, (TEXT,)).tolist()
    rows = []
    for shape, spread in tqdm({"peaked": 8.0, "flat": 1.0}.items(), desc="shapes"):
        logits = torch.randn(N + 1, vocab) * spread
        q = (logits[:N] + torch.randn(N, vocab)).softmax(-1)
        draft = core.Draft(
            [core.draw(row, u) for row, u in zip(q, core.uniform(rng, N), strict=True)], q
        )
        for name, sampling in CASES.items():
            times: dict[Any, list[float]] = {ours: [], theirs: []}
            for run in range(-2, runs):
                for method, measured in times.items():
                    began = time.perf_counter()
                    method(logits, text, draft, sampling, rng)
                    if run >= 0:  # the first two warm up
                        measured.append((time.perf_counter() - began) * 1e3)
            rows.append(
                {
                    "logits": shape,
                    "case": name,
                    "ours_ms": round(median(times[ours]), 3),
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
        print(f"{'logits':8}{'case':26}{'ours, ms':>10}{'transformers, ms':>18}")
        for row in rows:
            print(
                f"{row['logits']:8}{row['case']:26}{row['ours_ms']:10.2f}"
                f"{row['transformers_ms']:18.2f}"
            )
    document = {"vocab": given.vocab, "positions": N + 1, "threads": torch.get_num_threads()}
    print(json.dumps(document | {"torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
