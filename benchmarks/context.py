"""What does a longer text cost in each cycle? The KV cache and the n-gram index, beside others'.

Cache: append 6 tokens and take them back, in all 28 layers of Qwen3-0.6B's shape in bfloat16, no
model. Ours is preallocated, and truncating lowers a length. transformers' DynamicCache joins
tensors by `torch.cat`, then crops.

N-grams: propose 5 tokens in random text of Qwen3's vocabulary, by suffixes of 4 to 1 tokens. Where
`is_found` the last 4 tokens stand in the middle of the text as well. Else the last token stands
nowhere else. transformers is its PromptLookupCandidateGenerator, the search alone. Our index pays
beforehand, once for each token of the text: `index_us_per_token`.

All times are microseconds, medians of interleaved runs.

    python -m benchmarks.context [--cache 512 4096 16384] [--layers 28]
        [--ngram 1024 8192 32768 131072] [--runs 9] [--json]
"""

from collections.abc import Callable
from timeit import Timer
from typing import Any

import torch
from transformers import DynamicCache
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import benchmarks as bench
from drafters.ngram import NgramIndex
from serving.options import between

APPENDED = 6
HEADS, WIDTH = bench.SHAPES["0.6b"]["num_key_value_heads"], bench.SHAPES["0.6b"]["head_dim"]
SMALLEST, LARGEST, PROPOSED = 1, 4, 5
VOCABULARY = bench.SHAPES["0.6b"]["vocab_size"]
Cycle = Callable[[], Any]


def our_cache(num_layers: int, cached: torch.Tensor, new: torch.Tensor) -> Cycle:
    """A cycle of a SlotCache that holds `cached`; it returns the last layer's keys."""
    length = cached.shape[2]
    cache = bench.core.SlotCache(num_layers, 1, length + APPENDED, new.device, bench.core.Shapes())
    row = cache.open_row()

    def append(states: torch.Tensor) -> torch.Tensor:
        place = cache.place([row], [states.shape[2]])
        for layer in cache.layers:
            keys, _ = layer.update(states, states)
        cache.advance(place)
        return keys

    def cycle() -> torch.Tensor:
        keys = append(new)
        cache.truncate(row, length)
        return keys

    append(cached)
    return cycle


def their_cache(num_layers: int, cached: torch.Tensor, new: torch.Tensor) -> Cycle:
    """The same with a DynamicCache."""
    cache = DynamicCache()

    def append(states: torch.Tensor) -> torch.Tensor:
        for layer in range(num_layers):
            keys, _ = cache.update(states, states, layer)
        return keys

    def cycle() -> torch.Tensor:
        keys = append(new)
        cache.crop(-APPENDED)
        return keys

    append(cached)
    return cycle


@torch.inference_mode()
def cache_row(context: int, num_layers: int, runs: int) -> dict[str, Any]:
    """One length of the context."""
    torch.manual_seed(0)
    states = [torch.randn(1, HEADS, n, WIDTH, dtype=torch.bfloat16) for n in (context, APPENDED)]
    ours, theirs = our_cache(num_layers, *states), their_cache(num_layers, *states)
    is_equal = torch.equal(ours(), theirs())
    # The keys are not kept: only their shape is, so that memory is free again.
    methods = {"ours": lambda: ours().shape, "theirs": lambda: theirs().shape}
    timed = bench.interleave(methods, runs, f"cache, {context} tokens")
    return {
        "context": context,
        "ours_us": round(bench.median_ms(timed["ours"]) * 1e3, 1),
        "transformers_us": round(bench.median_ms(timed["theirs"]) * 1e3, 1),
        "ratio": bench.speedup(bench.times(timed["theirs"]), bench.times(timed["ours"])).median,
        "equal_keys": is_equal,
    }


def ngram_row(context: int, is_found: bool, runs: int) -> dict[str, Any]:
    """One length of the text."""
    text, middle = bench.random_tokens(VOCABULARY - 1, context), context // 2
    end = text[middle : middle + LARGEST] if is_found else [VOCABULARY - 1]
    text[-len(end) :] = end
    generator = PromptLookupCandidateGenerator(
        num_output_tokens=PROPOSED, max_matching_ngram_size=LARGEST, max_length=10 * context
    )
    ids, index = torch.tensor([text]), NgramIndex(SMALLEST, LARGEST)
    index.extend(text)
    searches = {
        "ours": lambda: index.continuation(PROPOSED),
        "transformers": lambda: generator.get_candidates(ids)[0][0, context:].tolist(),
    }
    drafts = [search() for search in searches.values()]
    methods: dict[str, Cycle] = {"index": lambda: NgramIndex(SMALLEST, LARGEST).extend(text)}
    counts = {"index": context}
    for name, search in searches.items():
        timer = Timer(search)
        counts[name] = max(1, timer.autorange()[0] // 100)  # so many take 2 ms or more
        methods[name] = lambda timer=timer, count=counts[name]: timer.timeit(count)
    timed = bench.interleave(methods, runs, f"n-grams, {context} tokens")
    us = {name: round(bench.median_ms(timed[name]) / counts[name] * 1e3, 2) for name in methods}
    return {
        "context": context,
        "is_found": is_found,
        "ours_us": us["ours"],
        "transformers_us": us["transformers"],
        "index_us_per_token": us["index"],
        "proposed": len(drafts[0]),
        "equal_drafts": drafts[0] == drafts[1],
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__, runs=9)
    for name, lengths in {
        "--cache": [512, 4096, 16_384],
        "--ngram": [1024, 8192, 32_768, 131_072],
    }.items():
        options.add_argument(name, type=between(64, 10**7), nargs="+", default=lengths)
    bench.add_count(options, "--layers", 1, 999, 28, "of the cache")
    given = options.parse_args(arguments)
    results = {
        "cache": [cache_row(length, given.layers, given.runs) for length in given.cache],
        "ngram": [
            ngram_row(length, is_found, given.runs)
            for is_found in (True, False)
            for length in given.ngram
        ],
    }
    bench.report(__spec__.name, arguments, given, results, ["cache", "ngram"])


if __name__ == "__main__":
    main()
