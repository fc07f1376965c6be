"""Is sampled output lossless? The first three tokens, with each drafter and kind of sampling.

The coupled rule promises plain decoding's own tokens: the same prompt is continued many times with
speculation and many times without, from the same seeds, and the table counts the differences. The
rule of rejection promises their distribution: seeds differ, and the counts of the second token, of
the third and of all three together are compared. A p-value says how often two samples of one
distribution would differ by so much: below 1e-6 something is broken, and values spread over 0 … 1
are what lossless looks like.

A second table shows what each rule keeps of the drafts: accepted share and tokens per pass over the
demo prompts with K = 5, every drafter by itself.

    python -m benchmarks.lossless [--samples 4096] [--seeds 3] [--drafter mine.py:Mine] [--json]

Source: Leviathan et al., arXiv 2211.17192, appendix A.1, for what must hold; Pearson's chi-squared
test of homogeneity for the comparison.
"""

import argparse
import json
from collections import Counter
from collections.abc import Hashable, Iterable
from operator import ne
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from benchmarks import core
from serving.options import between

Sampling = core.Sampling

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
K = 3
BATCH = 64


class ChiSquared(NamedTuple):
    """A test's result; p_value is the odds of a statistic this large if nothing is wrong."""

    statistic: float
    degrees: int
    p_value: float


def chi_squared(observed: list[float], expected: list[float]) -> ChiSquared:
    """Pearson's test of counts against the counts expected; both in all equally many.

    Example: chi_squared([18, 22], [20, 20]) -> statistic 0.4, 1 degree, p_value 0.53.
    """
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return _result(statistic, len(expected) - 1)


def same_distribution(ours: Iterable[Hashable], theirs: Iterable[Hashable]) -> ChiSquared:
    """Do two samples come from one distribution? Cells too rare to count (< 10) are pooled."""
    counts, others = Counter(ours), Counter(theirs)
    both = counts + others
    cells = [[counts[x], others[x]] for x, n in both.items() if n >= 10]
    rest = [counts.total() - sum(c for c, _ in cells), others.total() - sum(c for _, c in cells)]
    cells += [rest] if sum(rest) else []
    share = counts.total() / both.total()
    statistic = sum((a - share * (a + b)) ** 2 / (share * (a + b)) for a, b in cells)
    statistic += sum((b - (1 - share) * (a + b)) ** 2 / ((1 - share) * (a + b)) for a, b in cells)
    return _result(statistic, len(cells) - 1)


def _result(statistic: float, degrees: int) -> ChiSquared:
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    p_value = float(torch.special.gammaincc(*halves)) if degrees else 1.0
    return ChiSquared(statistic, degrees, p_value)


def compare(ours: list[tuple], theirs: list[tuple]) -> dict[str, ChiSquared]:
    """The test of each view of two samples of first tokens."""
    return {
        view: same_distribution([x[cut] for x in ours], [x[cut] for x in theirs])
        for view, cut in VIEWS.items()
    }


def first_tokens(engine: Any, request: Any, num_samples: int, num_tokens: int = 3) -> list[tuple]:
    """The first tokens of `num_samples` runs of a request, its seed counting up from run to run."""
    outputs: dict[int, tuple] = {}
    for begin in range(0, num_samples, BATCH):
        seeds = range(request.seed + begin, request.seed + min(begin + BATCH, num_samples))
        running = [engine.open(core.replace(request, seed=seed)) for seed in seeds]
        while running:
            engine.step(running)
            done = [s for s in running if s.finish_reason or len(s.output) >= num_tokens]
            for sequence in done:
                engine.close(sequence)
                outputs[sequence.request.seed] = tuple(sequence.output[:num_tokens])
            running = [s for s in running if s not in done]
    return [outputs[seed] for seed in sorted(outputs)]


def load(drafter: str | None = None) -> Any:
    """The embedded models, and a drafter of one's own, with a short KV cache of many rows."""
    return core.load_engine(
        core.Options(max_running=BATCH, max_model_len=32, drafter=drafter, fixed_k=True)
    )


def measure(engine: Any, num_samples: int) -> list[dict[str, Any]]:
    """One row per sampling and drafter: acceptance by both rules, differences, and the tests."""
    prompt = engine.target.tokenizer(PROMPT)["input_ids"]
    rows = []
    for name, coupled in tqdm(SAMPLINGS.items(), desc="samplings"):
        rejection = core.replace(coupled, verification="rejection")
        plain = core.Request(prompt, 12, None, 0, sampling=coupled, seed=1_000_000)
        theirs = first_tokens(engine, plain, num_samples)
        # With K fixed "auto" is the first of the others.
        for i, drafter in enumerate((n for n in engine.drafters if n != "auto"), 1):
            outputs, rates = {}, {}
            for sampling, seed in ((coupled, plain.seed), (rejection, 1_000_000 * (i + 1))):
                engine.totals[drafter] = core.Statistics()
                request = core.Request(prompt, 12, drafter, K, sampling=sampling, seed=seed)
                outputs[sampling.rule] = first_tokens(engine, request, num_samples)
                rates[sampling.rule] = engine.totals[drafter].draft_acceptance_rate
            differing = map(ne, theirs, outputs["coupled"])
            row = {
                "sampling": name,
                "drafter": drafter,
                "samples": num_samples,
                "draft_acceptance_rate": rates,
                "coupled_differing": sum(differing),
            }
            tests = compare(outputs["rejection"], theirs)
            rows.append(row | {view: test._asdict() for view, test in tests.items()})
    return rows


KEPT = {
    "temperature 0.8": Sampling(temperature=0.8),
    "temperature 1": Sampling(temperature=1.0),
    "0.8, top_k 50": Sampling(temperature=0.8, top_k=50),
    "1, top_p 0.9": Sampling(temperature=1.0, top_p=0.9),
}


def measure_kept(max_tokens: int, num_seeds: int) -> list[dict[str, Any]]:
    """One row per sampling and drafter: what each rule keeps of the same prompts' drafts."""
    engine = core.load_engine(core.Options(fixed_k=True))
    prompts = [engine.target.tokenizer(text)["input_ids"] for text in core.read_prompts().values()]
    rows = []
    cases = [(n, s, d) for n, s in KEPT.items() for d in engine.drafters if d != "auto"]
    for name, coupled, drafter in tqdm(cases, desc="kept"):
        row: dict[str, Any] = {"sampling": name, "drafter": drafter}
        for sampling in (coupled, core.replace(coupled, verification="rejection")):
            total = core.Statistics()
            for seed in range(num_seeds):
                for prompt in prompts:
                    request = core.Request(
                        prompt, max_tokens, drafter, sampling=sampling, seed=seed
                    )
                    *_, (sequence, _) = engine.generate(request)
                    total += sequence.statistics
            row[sampling.rule] = {
                "draft_acceptance_rate": total.draft_acceptance_rate,
                "tokens_per_pass": total.tokens_per_pass,
            }
        rows.append(row)
    return rows


def print_kept(rows: list[dict[str, Any]]) -> None:
    """Accepted share and tokens per pass by both rules, and what coupling loses of the latter."""
    print(f"\n{'sampling':18}{'drafter':12}{'coupled':>18}{'rejection':>18}{'lost':>8}")
    for row in rows:
        print(f"{row['sampling']:18}{row['drafter']:12}", end="")
        for rule in ("coupled", "rejection"):
            rate, passes = row[rule]["draft_acceptance_rate"], row[rule]["tokens_per_pass"]
            print(f"{_percent(rate):>11}{passes:7.2f}", end="")
        lost = 1 - row["coupled"]["tokens_per_pass"] / row["rejection"]["tokens_per_pass"]
        print(f"{lost:8.1%}")


def _percent(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:.1%}"


def main() -> None:
    """Run the command line: a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    count = between(16, 10**6)
    parser.add_argument("--samples", type=count, default=4096, help="a case (default: %(default)s)")
    parser.add_argument(
        "--max-tokens", type=between(2, 10**6), default=96, help="(default: %(default)s)"
    )
    parser.add_argument("--seeds", type=between(1, 100), default=3, help="(default: %(default)s)")
    parser.add_argument("--drafter", help="one of your own, as file.py:Class")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    given = parser.parse_args()
    rows = measure(load(given.drafter), given.samples)
    kept = measure_kept(given.max_tokens, given.seeds)
    if not given.json:
        views = "".join(f"  {view + ': χ² (degrees), p':>30}" for view in VIEWS)
        print(f"{'':36}{'coupled':>20}{'rejection':>11}")
        print(f"{'sampling':24}{'drafter':12}{'accepted, differing':>20}{'accepted':>11}{views}")
        for row in rows:
            rates = {rule: _percent(rate) for rule, rate in row["draft_acceptance_rate"].items()}
            print(f"{row['sampling']:24}{row['drafter']:12}", end="")
            print(f"{rates['coupled']:>10}{row['coupled_differing']:10}", end="")
            print(f"{rates['rejection']:>11}", end="")
            for view in VIEWS:
                test = row[view]
                text = f"{test['statistic']:.1f} ({test['degrees']}), {test['p_value']:.3f}"
                text = text if test["degrees"] else "too few samples"
                print(f"  {text:>30}", end="")
            print()
        print_kept(kept)
    print(json.dumps({"rows": rows, "kept": kept}))


if __name__ == "__main__":
    main()
