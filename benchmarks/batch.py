"""What does it bring to serve requests together? Batches of 1 … 16, speculation on and off.

The same requests one after another and in one batch, interleaved, tokens per second as medians; and
the longest gap between two tokens of a running request while a long prompt arrives, by the chunk in
which prompts are read.

    python -m benchmarks.batch [--runs 5] [--tokens 96] [--json]
"""

import argparse
import json
import time
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import core, interleave, median_ms
from serving.options import between

SIZES = (1, 2, 4, 8, 16)
CHUNKS = (64, 128, 256, 512, 2048)
LONG_PROMPT = 1800


def one_by_one(engine: Any, requests: list[Any]) -> list[list[int]]:
    """Each request alone; the outputs."""
    outputs = []
    for request in requests:
        *_, (sequence, _) = engine.generate(request)
        outputs.append(sequence.output)
    return outputs


def together(engine: Any, requests: list[Any]) -> list[list[int]]:
    """All of them in one batch; the outputs."""
    sequences = [engine.open(request) for request in requests]
    running = sequences
    while running:
        engine.step(running)
        for sequence in running:
            if sequence.finish_reason:
                engine.close(sequence)
        running = [s for s in running if not s.finish_reason]
    return [s.output for s in sequences]


def measure_batches(engine: Any, runs: int, num_tokens: int) -> list[dict[str, Any]]:
    """One row per drafter and size: tokens per second both ways, and whether outputs agree."""
    encode = engine.target.tokenizer
    prompts = [encode(text)["input_ids"] for text in core.read_prompts().values()] * 2
    cases = [(size, None, False) for size in SIZES]
    cases += [
        (size, name, is_fixed)
        for size in SIZES
        for name in engine.drafters
        for is_fixed in (True, False)
        if not (is_fixed and name == "auto")  # it is the controller that chooses for it
    ]
    rows, controller = [], engine.controller
    for size, name, is_fixed in sorted(cases, key=lambda case: case[0]):
        engine.controller = None if is_fixed else controller
        requests = [core.Request(prompt, num_tokens, name) for prompt in prompts[:size]]
        methods = {
            method: lambda run=method, given=requests: run(engine, given)
            for method in (one_by_one, together)
        }
        timed = interleave(methods, runs, f"batch of {size}, {name or 'none'}")
        outputs = {method: calls[-1].result for method, calls in timed.items()}
        tokens = sum(map(len, outputs[together]))
        alone, batched = (tokens / median_ms(calls) * 1e3 for calls in timed.values())
        rows.append(
            {
                "batch": size,
                "drafter": name or "none",
                "k": "–" if name is None else "5" if is_fixed else "controller",
                "alone_tokens_per_s": round(alone, 1),
                "batch_tokens_per_s": round(batched, 1),
                "ratio": round(batched / alone, 2),
                "identical": outputs[one_by_one] == outputs[together],
            }
        )
    engine.controller = controller
    return rows


def measure_gaps(engine: Any, runs: int) -> list[dict[str, Any]]:
    """The longest time between two tokens of a plain request while a long prompt is read, in ms."""
    prompt = engine.target.tokenizer("def main():\n")["input_ids"]
    rows, default = [], engine.prefill_chunk
    for chunk in tqdm(CHUNKS, desc="chunks"):
        engine.prefill_chunk = chunk
        longest, first_token = [], []
        for _ in range(runs):
            running = engine.open(core.Request(prompt, 1000))
            for _ in range(5):
                engine.step([running])
            late = engine.open(core.Request([7] * LONG_PROMPT, 2))
            gaps, began = [], time.perf_counter()
            while not late.num_steps:
                cycle_began = time.perf_counter()
                engine.step([running, late])
                gaps.append(time.perf_counter() - cycle_began)
            first_token.append(time.perf_counter() - began)
            longest.append(max(gaps))
            for sequence in (running, late):
                engine.close(sequence)
        rows.append(
            {
                "prefill_chunk": chunk,
                "longest_gap_ms": round(median(longest) * 1e3, 1),
                "time_to_first_token_ms": round(median(first_token) * 1e3, 1),
            }
        )
    engine.prefill_chunk = default
    return rows


def main() -> None:
    """Run the command line: tables, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=between(1, 99), default=5, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=between(2, 1000), default=96, help="a request")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    given = parser.parse_args()
    engine = core.load_engine(core.Options(max_running=max(SIZES)))
    engine.eos_ids = set()  # every request as long as the others
    document = {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "batches": measure_batches(engine, given.runs, given.tokens),
        "gaps": measure_gaps(engine, given.runs),
    }
    if not given.json:
        print(
            f"{'batch':>5} {'drafter':12}{'K':>11}"
            f"{'one by one':>11}{'together':>10} tok/s{'ratio':>7}"
        )
        for row in document["batches"]:
            print(
                f"{row['batch']:5} {row['drafter']:12}{row['k']:>11}"
                f"{row['alone_tokens_per_s']:11.0f}"
                f"{row['batch_tokens_per_s']:10.0f}      {row['ratio']:7.2f}"
                f"{'' if row['identical'] else '  outputs differ'}"
            )
        print(f"\n{'chunk':>6}{'longest gap, ms':>17}{'first token of 1 800, ms':>26}")
        for row in document["gaps"]:
            print(
                f"{row['prefill_chunk']:6}{row['longest_gap_ms']:17.1f}"
                f"{row['time_to_first_token_ms']:26.1f}"
            )
    print(json.dumps(document))


if __name__ == "__main__":
    main()
