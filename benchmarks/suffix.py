"""What does the drafter suffix guess that ngram does not, and what does a proposal cost?

`passes`: tokens per pass after the prefill, at a fixed K, over the demo prompts (in a chat model's
template), eight prompts of agents and editors, and four of new text (agent_prompts.jsonl). ngram
and `alone` have the request's own text only. `after_others` has the outputs of the prompts before
it in the list, as on a server that everybody uses; `again` has each prompt a second time, and
`resampled` a second time, sampled, from another seed (`ngram_resampled` beside it).

`costs`, in microseconds: a token that is appended, a proposal of up to 16 tokens (median and p99)
and catching up after another request has ended, where past outputs hold so many tokens.

    python -m benchmarks.suffix [--model smollm2] [--k 5] [--tokens 128] [--temperature 0.8]
        [--sizes 1000 10000 100000] [--json]
"""

import argparse
import random
import time
from statistics import median
from typing import Any

from tqdm import tqdm

import benchmarks as bench
from benchmarks import core
from drafters.suffix import SuffixDrafter
from messages import Request, Sampling, Verdict
from serving.options import between
from serving.parsing import MAX_SPECULATIVE_TOKENS

PROMPTS = bench.ROOT / "benchmarks" / "agent_prompts.jsonl"
_HELD = 1_000_000  # tokens: nothing is forgotten here
_NUM_TIMED = 1000


KINDS = {"agent": "agents and editors", "edit": "agents and editors", "new": "new text"}
Counted = tuple[float | None, list[list[int]]]  # tokens per pass, and the outputs


def count(
    engine: Any, prompts: list[list[int]], drafter: str, given: argparse.Namespace, **how: Any
) -> Counted:
    """Each prompt once, one after the other."""
    found = [
        bench.run(engine, Request(prompt, given.tokens, drafter, given.k, **how))
        for prompt in tqdm(prompts, desc=drafter)
    ]
    return bench.places(bench.total(found).tokens_per_pass, 2), bench.outputs(found)


def measure(
    engine: Any, prompts: dict[str, list[int]], given: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row per kind of prompts."""
    kinds: dict[str, list[list[int]]] = {}
    for name, prompt in prompts.items():
        kinds.setdefault(KINDS.get(name.partition("_")[0], "demo"), []).append(prompt)
    return [row_of(engine, kind, group, given) for kind, group in kinds.items()]


def row_of(
    engine: Any, kind: str, prompts: list[list[int]], given: argparse.Namespace
) -> dict[str, Any]:
    """What each way of drafting comes to on one kind of prompts."""
    ngram = engine.panel.drafters["ngram"]
    drafters = [{"ngram": ngram, "suffix": SuffixDrafter(_HELD)} for _ in range(2)]
    greedy, sampled = (core.Engine(engine.target, each) for each in drafters)
    results = {
        "ngram": count(greedy, prompts, "ngram", given),
        "alone": count(greedy, prompts, "suffix", given, is_alone=True),
        "after_others": count(greedy, prompts, "suffix", given),
        "again": count(greedy, prompts, "suffix", given),
    }
    is_equal = all(outputs == results["ngram"][1] for _, outputs in results.values())
    sampling = Sampling(temperature=given.temperature)
    count(sampled, prompts, "suffix", given, sampling=sampling, seed=1)
    for name, drafter in (("ngram_resampled", "ngram"), ("resampled", "suffix")):
        results[name] = count(sampled, prompts, drafter, given, sampling=sampling, seed=2)
    is_equal &= results["ngram_resampled"][1] == results["resampled"][1]
    rates = {name: rate for name, (rate, _) in results.items()}
    return {"prompts": f"{kind} ({len(prompts)})"} | rates | {"equal": is_equal}


def costs(size: int, texts: list[list[int]], vocabulary: int) -> dict[str, Any]:
    """What the drafter costs where past outputs hold `size` tokens, pieces of these texts."""
    chance, drafter = random.Random(0), SuffixDrafter(2 * size)
    every = [token for text in texts for token in text]

    def piece() -> list[int]:
        """3 to 40 tokens as they stand somewhere, and one by chance."""
        begin = chance.randrange(len(every))
        return [*every[begin : begin + chance.randint(3, 40)], chance.randrange(vocabulary)]

    def text(count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            found += piece()
        return found[:count]

    began = time.perf_counter()
    while len(drafter.past) + 101 <= size:
        drafter.past.add(text(100))
    append_us = (time.perf_counter() - began) / len(drafter.past) * 1e6
    state = drafter.open(text(1000), Sampling(), None)
    proposals, catching_up = [], []
    for token in text(_NUM_TIMED):
        drafter.observe(state, Verdict(0, 0, [token]))
        began = time.perf_counter()
        drafter.propose(state, MAX_SPECULATIVE_TOKENS)
        proposed = time.perf_counter()
        state.version = -1
        state.find(drafter.past, 0)
        proposals.append((proposed - began) * 1e6)
        catching_up.append((time.perf_counter() - proposed) * 1e6)
    return {
        "tokens": len(drafter.past),
        "append_us": round(append_us, 1),
        "propose_us": round(median(proposals), 1),
        "propose_p99_us": round(sorted(proposals)[_NUM_TIMED * 99 // 100], 1),
        "catch_up_us": round(median(catching_up), 1),
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__, runs=None)
    options.add_argument("--model", default="embedded", help="the target (default: %(default)s)")
    options.add_argument("--k", type=between(1, MAX_SPECULATIVE_TOKENS), default=5)
    options.add_argument("--temperature", type=float, default=0.8, help="of resampled texts")
    options.add_argument("--sizes", type=between(100, 1_000_000), nargs="*",
                         default=[1000, 10_000, 100_000], help="of past outputs")  # fmt: skip
    bench.add_count(options, "--tokens", 2, 100_000, 128, "a request, at most")
    given = options.parse_args(arguments)
    engine = bench.load_engine(model=given.model, drafter="ngram", fixed_k=True, max_running=1)
    is_chat = bool(engine.target.tokenizer.chat_template)
    texts = bench.demo.read_prompts(is_chat) | bench.prompts_of(PROMPTS)
    prompts = bench.ids_of(texts, engine)
    rows = measure(engine, prompts, given)
    every, size = list(prompts.values()), engine.target.vocab_size
    results = {"passes": rows, "costs": [costs(count, every, size) for count in given.sizes]}
    bench.report(__spec__.name, arguments, given, results, ["passes", "costs"])


if __name__ == "__main__":
    main()
