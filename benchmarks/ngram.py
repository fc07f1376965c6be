"""What does an n-gram proposal cost? The hash index against two searches, at 1k … 128k tokens.

Random text of Qwen3's vocabulary, suffixes of 4 to 1 tokens, 5 tokens to propose, microseconds,
medians of interleaved runs. `found`: the last 4 tokens stand in the middle of the text as well, so
that all must propose the same; `new`: the last token is nowhere else, and the searches read the
text once for each size. transformers is its PromptLookupCandidateGenerator, the search alone: in
generate() logits processors then look at each proposed token. The index pays beforehand, once for
each token of the text: `index_us_per_token`.

    python -m benchmarks.ngram [--context 1024 8192 32768 131072] [--runs 9] [--json]
        [--plot FILE.png]
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from benchmarks import SHAPES, describe, finish, interleave, parser
from drafters.ngram import NgramIndex
from serving.options import between

SMALLEST, LARGEST, PROPOSED = 1, 4, 5
VOCABULARY = SHAPES["0.6b"]["vocab_size"]
LEAST_MS = 2  # a timed call lasts at least so long: it repeats what is faster
METHODS = ("index", "transformers", "python_scan")


def text_of(context: int, is_found: bool) -> list[int]:
    """`context` random tokens; the last ones stand in the middle too, or the last one nowhere."""
    text = torch.randint(VOCABULARY - 1, (context,)).tolist()
    middle = context // 2
    if is_found:
        return text[:-LARGEST] + text[middle : middle + LARGEST]
    return text[:-1] + [VOCABULARY - 1]


def scan(text: list[int]) -> list[int]:
    """The latest earlier occurrence of the longest suffix, looked for from the end."""
    for size in range(LARGEST, SMALLEST - 1, -1):
        suffix = text[-size:]
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == suffix:
                return text[start + size : start + size + PROPOSED]
    return []


def build(text: list[int], runs: int) -> tuple[NgramIndex, float]:
    """An index of the text, and the seconds that took, as a median."""
    times = []
    for _ in range(runs):
        index = NgramIndex(SMALLEST, LARGEST)
        began = time.perf_counter()
        index.extend(text)
        times.append(time.perf_counter() - began)
    return index, median(times)


def lookup(text: list[int]) -> Callable[[], list[int]]:
    """transformers' search, on ids that are a tensor already."""
    generator = PromptLookupCandidateGenerator(
        num_output_tokens=PROPOSED, max_matching_ngram_size=LARGEST, max_length=10 * len(text)
    )
    ids = torch.tensor([text])
    return lambda: generator.get_candidates(ids)[0][0, len(text) :].tolist()


def repeated(method: Callable[[], Any]) -> tuple[Callable[[], None], int]:
    """A function that calls the method often enough to be timed, and how often that is."""
    count, spent = 1, 0.0
    while spent < LEAST_MS / 1e3:
        count *= 2
        began = time.perf_counter()
        for _ in range(count):
            method()
        spent = time.perf_counter() - began

    def run() -> None:
        for _ in range(count):
            method()

    return run, count


def measure(context: int, is_found: bool, runs: int) -> dict[str, Any]:
    """One length's row."""
    torch.manual_seed(0)
    text = text_of(context, is_found)
    index, build_s = build(text, runs)
    methods = {
        "index": lambda: index.continuation(PROPOSED),
        "transformers": lookup(text),
        "python_scan": lambda: scan(text),
    }
    drafts = [method() for method in methods.values()]
    loops = {name: repeated(method) for name, method in methods.items()}
    timed = interleave({name: run for name, (run, _) in loops.items()}, runs, f"{context} tokens")
    us = {
        f"{name}_us": round(median(call.ms for call in timed[name]) * 1e3 / count, 2)
        for name, (_, count) in loops.items()
    }
    return {
        "context": context,
        "case": "found" if is_found else "new",
        **us,
        "index_us_per_token": round(build_s / context * 1e6, 2),
        "proposed": len(drafts[0]),
        "equal_drafts": all(draft == drafts[0] for draft in drafts),
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: a table, then one JSON line."""
    options = parser(__doc__, runs=9)
    length = between(64, 10**7)
    lengths = [1024, 8192, 32_768, 131_072]
    options.add_argument("--context", type=length, nargs="+", default=lengths)
    given = options.parse_args(arguments)
    rows = [
        measure(context, is_found, given.runs)
        for is_found in (True, False)
        for context in given.context
    ]
    document = describe(__spec__.name, arguments) | {
        "sizes": [SMALLEST, LARGEST],
        "to_propose": PROPOSED,
        "runs": given.runs,
        "results": rows,
    }
    panels = {
        case: {
            name: [(r["context"], r[f"{name}_us"]) for r in rows if r["case"] == case]
            for name in METHODS
        }
        for case in ("found", "new")
    }
    plot = {"panels": panels, "x_label": "tokens of text", "y_label": "µs a proposal"}
    finish(given, document, ["results"], plot | {"is_log": True})


if __name__ == "__main__":
    main()
