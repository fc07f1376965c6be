"""Is sampled output lossless? The first three tokens, with each drafter and kind of sampling.

The coupled rule promises plain decoding's own tokens: the same prompt is continued many times with
speculation and many times without, from the same seeds, and the table counts the differences. The
rule of rejection promises their distribution: seeds differ, and the counts of the second token, of
the third and of all three together are compared. A p-value says how often two samples of one
distribution would differ by so much: below 1e-6 something is broken, and values spread over 0 … 1
are what lossless looks like.

    python -m tools.lossless [--samples 4096] [--drafter mine.py:Mine] [--json]

Source: Leviathan et al., arXiv 2211.17192, appendix A.1, for what must hold; Pearson's chi-squared
test of homogeneity for the comparison.
"""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import replace
from math import log
from operator import ne
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

import tools as bench
from runtime.values import Engine, Request, Sampling

PROMPT = "A B C A B"  # copying, the small model and the head all propose, and are often wrong
SAMPLINGS = {
    "temperature 0.7": Sampling(temperature=0.7),
    "temperature 1.3": Sampling(temperature=1.3),
    "top_k 8": Sampling(temperature=1.0, top_k=8),
    "top_p 0.8": Sampling(temperature=1.0, top_p=0.8),
    "min_p 0.05": Sampling(temperature=1.3, min_p=0.05),
    "repetition_penalty 1.2": Sampling(temperature=0.7, repetition_penalty=1.2),
    "all of them": Sampling(0.9, 1.2, 40, 0.95, 0.01),
}
VIEWS = {"2nd token": slice(1, 2), "3rd token": slice(2, 3), "all three": slice(0, 3)}
K, BATCH, NUM_TOKENS = 3, 64, 3


class ChiSquared(NamedTuple):
    """A test's result; p_value is the odds of a statistic this large if nothing is wrong."""

    statistic: float
    degrees: int
    p_value: float


def chi_squared(
    observed: list[float], expected: list[float], degrees: int | None = None
) -> ChiSquared:
    """Pearson's test of counts against the counts expected; both in all equally many.

    Example: chi_squared([18, 22], [20, 20]) -> statistic 0.4, 1 degree, p_value 0.53.
    """
    degrees = len(expected) - 1 if degrees is None else degrees
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return ChiSquared(statistic, degrees, p_value_of(statistic, degrees) if degrees else 1.0)


def p_value_of(statistic: float, degrees: int) -> float:
    """The odds of a statistic this large or larger under χ² with so many degrees of freedom."""
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves))


def deviance(observed: Iterable[float], expected: Iterable[float]) -> float:
    """How unlike counts are the counts expected; χ²-distributed, as Pearson's sum of squares is.

    Unlike that it can be trusted where little is expected: by Chernoff's bound a cell's deviance is
    more than x with odds of at most 2 exp(-x / 2).
    """
    total = 0.0
    for seen, right in zip(observed, expected, strict=True):
        right = max(right, 1e-9)
        total += 2 * ((seen * log(seen / right) if seen else 0.0) - seen + right)
    return total


def same_distribution(ours: list[Hashable], theirs: list[Hashable]) -> ChiSquared:
    """Do two samples come from one distribution? Cells too rare to count (< 10) are pooled."""
    seen = Counter([*ours, *theirs])
    samples = [Counter(x if seen[x] >= 10 else None for x in each) for each in (ours, theirs)]
    both = samples[0] + samples[1]
    observed = [sample[cell] for sample in samples for cell in both]
    expected = [both[cell] * s.total() / both.total() for s in samples for cell in both]
    return chi_squared(observed, expected, len(both) - 1)


def compare(ours: list[tuple], theirs: list[tuple]) -> dict[str, ChiSquared]:
    """The test of each view of two samples of first tokens."""
    return {
        view: same_distribution([x[cut] for x in ours], [x[cut] for x in theirs])
        for view, cut in VIEWS.items()
    }


def sample(engine: Engine, request: Request, count: int, **how: Any) -> list[bench.Finished]:
    """The beginnings of `count` runs of a request, its seed counting up from run to run."""
    requests = [replace(request, seed=request.seed + i) for i in range(count)]
    return bench.run_together(engine, requests, NUM_TOKENS, BATCH, **how)


def first_tokens(engine: Engine, request: Request, count: int, **how: Any) -> list[tuple]:
    """The first tokens of `count` runs of a request, with one seed after another."""
    return [tuple(one.output[:NUM_TOKENS]) for one in sample(engine, request, count, **how)]


def measure(engine: Engine, num_samples: int) -> list[dict[str, Any]]:
    """One row per sampling and drafter: acceptance by both rules, differences, and the tests."""
    prompt, rows = engine.target.tokenizer(PROMPT)["input_ids"], []
    names = bench.names_of(engine)
    progress = tqdm(desc="texts", total=num_samples * len(SAMPLINGS) * (1 + 2 * len(names)))
    for name, coupled in SAMPLINGS.items():
        rejection = replace(coupled, verification="rejection")
        plain = Request(prompt, 12, None, 0, sampling=coupled, seed=1_000_000)
        theirs = first_tokens(engine, plain, num_samples, at_end=progress.update)
        for i, drafter in enumerate(names, 1):
            row = {"sampling": name, "drafter": drafter, "samples": num_samples}
            ours, rates = {}, {}
            for sampling, seed in ((coupled, plain.seed), (rejection, 1_000_000 * (i + 1))):
                request = Request(prompt, 12, drafter, K, sampling=sampling, seed=seed)
                found = sample(engine, request, num_samples, at_end=progress.update)
                ours[sampling.rule] = [tuple(one.output[:NUM_TOKENS]) for one in found]
                rates[sampling.rule] = bench.total(found).draft_acceptance_rate
            row["draft_acceptance_rate"] = rates
            row["coupled_differing"] = sum(map(ne, theirs, ours["coupled"]))
            tests = compare(ours["rejection"], theirs)
            rows.append(row | {view: test._asdict() for view, test in tests.items()})
    return rows


def readable(row: dict[str, Any]) -> dict[str, Any]:
    """A row for the table: dictionaries in it become columns, a test its p-value."""
    flat_row: dict[str, Any] = {}
    for key, value in row.items():
        if not isinstance(value, dict):
            flat_row[key] = value
        elif "p_value" in value:
            flat_row[f"{key}: p"] = bench.places(value["p_value"], 4) if value["degrees"] else None
        else:
            flat_row |= {f"{key}: {name}": bench.places(part) for name, part in value.items()}
    return flat_row


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__, runs=None)
    bench.add_count(options, "--samples", 16, 10**6, 4096, "of a case")
    options.add_argument("--drafter", type=bench.drafter, help="one of your own: file.py:Class")
    flags = options.parse_args(arguments)
    short = {"max_running": BATCH, "max_model_len": 32, "drafter": flags.drafter}
    engine = bench.load_engine(fixed_k=True, **short)
    rows = measure(engine, flags.samples)
    bench.report(__spec__.name, arguments, flags, {"rows": rows}, readable)


if __name__ == "__main__":
    main()
