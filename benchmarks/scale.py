"""What is left of speculation's gain in large batches, on several devices, behind long contexts?

On paper: a pass takes as long as its bytes take to be read, or its numbers to be computed, whatever
is longer, and its all-reduces (`pass_s`; every assumption is a field of Machine or Shape). Then by
simulation: requests accept or reject by chance from a seed, and each cycle takes what its costs say
(`benchmarks.simulation`). The same simulation, with times of this server's parts, is held against
its measured batches, and tells what optimistic scheduling would bring here.

    python -m benchmarks.scale [--seed 0] [--cycles 8000] [--json]

The times are results/cycle_times.json and scale_batch.json, which `benchmarks.cycle_times` and
`benchmarks.batch` have printed. Speed-ups are tokens per second in those of plain decoding in the
same batch. Not covered: prompts that are read meanwhile, pipelines, quantisation, drafts that
branch, a K that differs by request.
docs/speed.md explains the tables on paper.
"""

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import benchmarks as bench
from benchmarks.cycle_times import NONE, from_one, measured, replayed
from benchmarks.simulation import DRAFT, IN_ORDER, LAUNCH, SKIP, Costs, Text, drained, steady
from control.formulas import break_even_alpha, expected_tokens

RESULTS = Path(__file__).parent / "results"
BYTES = 2  # of a number in bfloat16
MOST_K = 8
ALPHA, K = 0.75, 4  # on paper
DRAFTERS = ("ngram", "draft_model", "mtp")  # of the tables from measurements
REPEATS = 8  # of a simulated batch, whose mean counts


# ----------------------------------------------------------------------------------- the roofline
@dataclass(frozen=True)
class Machine:
    """A device, and how many there are. The data sheet's figures are NVIDIA's for the H100 SXM."""

    devices: int = 1
    bytes_per_s: float = 3.35e12  # data sheet: HBM3
    flop_per_s: float = 989e12  # data sheet: bfloat16, dense
    link_bytes_per_s: float = 450e9  # data sheet: NVLink, one direction
    memory_bytes: float = 80e9  # data sheet
    bandwidth_share: float = 0.8  # assumed: what kernels reach of it
    flop_share: float = 0.6  # assumed
    all_reduce_s: float = 10e-6  # assumed: for a message of no size


@dataclass(frozen=True)
class Shape:
    """A transformer with gated MLPs: numbers in its weights, from its config.json."""

    layers: int
    width: int
    inner: int  # of an MLP, or of one expert
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int = 1
    experts_used: int = 1  # by each token

    def weights(self, experts: float) -> float:
        """Numbers in all layers with so many experts, and in the unembedding."""
        attention = 2 * self.width * self.head_dim * (self.heads + self.kv_heads)
        expert = 3 * self.width * self.inner
        return self.layers * (attention + experts * expert) + self.vocabulary * self.width

    def experts_touched(self, rows: int) -> float:
        """Of a layer, by so many rows that choose at random: N · (1 - (1 - k/N)^n).

        >>> Shape(1, 1, 1, 1, 1, 1, 1, experts=8, experts_used=2).experts_touched(2)
        3.5
        """
        return self.experts * (1 - (1 - self.experts_used / self.experts) ** rows)

    @property
    def kv_bytes(self) -> int:
        """Of one token of a request."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES


QWEN3_8B = Shape(36, 4096, 12_288, 32, 8, 128, 151_936)
QWEN3_06B = Shape(28, 1024, 3072, 16, 8, 128, 151_936)
QWEN3_30B_A3B = Shape(48, 2048, 768, 32, 4, 128, 151_936, experts=128, experts_used=8)
LLAMA_70B = Shape(80, 8192, 28_672, 64, 8, 128, 128_256)
LLAMA_1B = Shape(16, 2048, 8192, 32, 8, 64, 128_256)


def pass_s(shape: Shape, machine: Machine, batch: int, width: int, context: int) -> float:
    """Seconds of a pass over `width` tokens of each of `batch` requests behind `context` tokens.

    Each weight is read once for all rows, and a request's keys and values once for all of its rows.
    """
    rows = batch * width
    bandwidth = machine.bytes_per_s * machine.bandwidth_share * machine.devices
    speed = machine.flop_per_s * machine.flop_share * machine.devices
    read = shape.weights(shape.experts_touched(rows)) * BYTES / bandwidth
    multiplied = 2 * rows * shape.weights(shape.experts_used) / speed
    keys_read = batch * context * shape.kv_bytes / bandwidth
    attended = 4 * rows * context * shape.layers * shape.heads * shape.head_dim / speed
    seconds = max(read, multiplied) + max(keys_read, attended)
    if machine.devices > 1:  # two all-reduces in each layer, as a ring
        sent = 2 * (1 - 1 / machine.devices) * rows * shape.width * BYTES
        seconds += 2 * shape.layers * (machine.all_reduce_s + sent / machine.link_bytes_per_s)
    return seconds


def fits(shape: Shape, machine: Machine, batch: int, context: int) -> bool:
    """Whether weights and KV cache fit into the devices."""
    needed = shape.weights(shape.experts) * BYTES + batch * context * shape.kv_bytes
    return needed < machine.memory_bytes * machine.devices


def roofline(
    target: Shape, machine: Machine, k: int, context: int, draft: Shape | None, on: Machine
) -> Costs:
    """Costs on paper; `draft` on the machine `on`, or None where drafts cost nothing."""

    def drafting(batch: int) -> float:
        return k * pass_s(draft, on, batch, 1, context) if draft and k else 0.0

    def verify(batch: int, rows: int) -> float:
        return pass_s(target, machine, batch, rows // batch, context)

    return Costs(drafting, verify, lambda _: 0.0)


# ------------------------------------------------------------------------------- tables, on paper
def gain(target: Shape, machine: Machine, batch: int, context: int, alpha: float, k: int,
         draft: Shape | None = None, on: Machine | None = None) -> dict[str, Any]:  # fmt: skip
    """The closed form E / (K · c + t_verify) and its parts; None where it does not fit."""
    if not fits(target, machine, batch, context):
        return dict.fromkeys(("plain_ms", "c", "t_verify", "speedup", "break_even", "best"))
    costs = roofline(target, machine, 1, context, draft, on or machine)
    plain = costs.verify(batch, batch)
    c = costs.draft(batch) / plain
    wide = [costs.verify(batch, batch * (i + 1)) / plain for i in range(MOST_K + 1)]
    each = [expected_tokens(alpha, i) / (i * c + wide[i]) for i in range(MOST_K + 1)]
    best = max(range(MOST_K + 1), key=each.__getitem__)
    return {
        "plain_ms": plain * 1e3,
        "c": c,
        "t_verify": wide[k],
        "speedup": each[k],
        "break_even": break_even_alpha(k, c, wide[k]),
        "best": f"{each[best]:.2f} (K={best})",
    }


def shown(found: dict[str, Any], *names: str) -> dict[str, Any]:
    """Some of the figures, rounded."""
    chosen = {name: found[name] for name in names or found}
    return {n: round(v, 3) if isinstance(v, float) else v for n, v in chosen.items()}


def by_batch(cycles: int, chance: random.Random) -> list[dict[str, Any]]:
    """Dense and MoE, one device, with a draft model: formula beside simulation."""
    rows, one = [], Machine()
    for name, shape in (("8B", QWEN3_8B), ("30B-A3B", QWEN3_30B_A3B)):
        for batch in (1, 4, 16, 64, 256):
            found = gain(shape, one, batch, 500, ALPHA, K, QWEN3_06B)
            if found["speedup"] is None:
                continue
            texts = [Text.of(ALPHA, K)] * batch
            costs = roofline(shape, one, K, 500, QWEN3_06B, one)
            plain = batch / costs.verify(batch, batch)
            simulated = steady(texts, costs, cycles, chance) / plain
            rows.append({"model": name, "batch": batch} | shown(found)
                        | {"simulated": round(simulated, 3)})  # fmt: skip
    return rows


def by_context() -> list[dict[str, Any]]:
    """Long texts: keys and values are read once for all rows, by the target and by the draft."""
    rows = []
    for name, shape, draft, devices in (
        ("8B", QWEN3_8B, QWEN3_06B, 1),
        ("70B", LLAMA_70B, LLAMA_1B, 8),
    ):
        many = Machine(devices=devices)
        for batch in (4, 64) if devices == 1 else (16, 128):
            for context in (1000, 64_000) if batch < 64 else (1000, 8000):
                free, drafted = (
                    gain(shape, many, batch, context, ALPHA, K, model) for model in (None, draft)
                )
                if free["speedup"] is not None:
                    rows.append(
                        {"model": name, "devices": devices, "batch": batch, "context": context}
                        | shown(drafted, "plain_ms", "c", "t_verify")
                        | {"free_draft": round(free["speedup"], 3)}
                        | {"draft_model": round(drafted["speedup"], 3)}
                    )
    return rows


def by_devices() -> list[dict[str, Any]]:
    """Where the draft model runs, and what an all-reduce takes."""
    rows = []
    for batch in (1, 64):
        for devices, micros in ((2, 10), (8, 10), (8, 100)):
            many = Machine(devices=devices, all_reduce_s=micros * 1e-6)
            plain, one, all_of_them = (
                gain(LLAMA_70B, many, batch, 500, ALPHA, K, draft, on)
                for draft, on in ((None, None), (LLAMA_1B, replace(many, devices=1)),
                                  (LLAMA_1B, many))
            )  # fmt: skip
            rows.append({"batch": batch, "devices": devices, "link_us": micros}
                        | shown(plain, "plain_ms", "t_verify")
                        | {"free_draft": round(plain["speedup"], 3)}
                        | {"c_on_one": round(one["c"], 3), "on_one": round(one["speedup"], 3)}
                        | {"c_on_all": round(all_of_them["c"], 3),
                           "on_all": round(all_of_them["speedup"], 3)})  # fmt: skip
    return rows


# ------------------------------------------------------------------------ tables, from measurements
def against_measured(
    times: dict[str, Any], batches: dict[str, Any], chance: random.Random
) -> list[dict[str, Any]]:
    """Speed-ups of this server's batches: simulated, measured likewise, and by benchmarks.batch."""
    parts = {(row["drafter"], row["batch"]): row for row in times["parts"]}
    clocked = {
        (r["drafter"], r["batch"]): r for r in batches["batches"] if r["k"] == f"{times['k']}"
    }
    rows = []
    for (name, size), of_it in parts.items():
        if name not in DRAFTERS:
            continue
        truth = parts[NONE, size]["whole"] / of_it["whole"]
        row = {"batch": size, "drafter": name, "measured": round(truth, 3)}
        for title, costs in (("predicted", measured), ("from_one", from_one)):
            texts = [replayed(counts) for counts in times["texts"][name][:size]]
            plain = [Text({(0, 0): 1}, 0.0)] * size
            without, spent = (
                parts[who, size]["prompts"] / 1e3
                # The prompt's pass gives the first token.
                + mean(drained(each, costs(times, who), times["tokens"] - 1, chance) for _ in turns)
                for who, each, turns in ((NONE, plain, range(1)), (name, texts, range(REPEATS)))
            )
            value = without / spent
            row |= {title: round(value, 3), f"{title}_error": round(value / truth - 1, 3)}
        of_clock = clocked.get((name, size), {"of_none": None, "quartiles": None})
        rows.append(row | {"clock_2": of_clock["of_none"], "quartiles": of_clock["quartiles"]})
    return rows


def schedules(times: dict[str, Any], cycles: int, chance: random.Random) -> list[dict[str, Any]]:
    """Optimistic scheduling with this server's times; speeds in that of one thing at a time."""
    rows = []
    sizes = sorted({row["batch"] for row in times["parts"]})
    for name in DRAFTERS:
        counts, costs = times["texts"][name], measured(times, name)
        for size in sizes[::4]:
            texts = [replayed(one) for one in counts[:size]]
            seed = chance.random()  # the same drafts and texts by every schedule
            speeds = {s: steady(texts, costs, cycles, random.Random(seed), s)
                      for s in (IN_ORDER, LAUNCH, DRAFT, SKIP)}  # fmt: skip
            parts = next(row for row in times["parts"]
                         if (row["drafter"], row["batch"]) == (name, size))  # fmt: skip
            rows.append(
                {"drafter": name, "batch": size}
                | {f"{part}_ms": round(parts[part], 2) for part in ("draft", "verify", "other")}
                | {s.replace(",", ""): round(speeds[s] / speeds[IN_ORDER], 3)
                   for s in (LAUNCH, DRAFT, SKIP)}
            )  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__, runs=None)
    bench.add_count(options, "--seed", 0, 2**31, 0, "of the simulations")
    bench.add_count(options, "--cycles", 1, 10**7, 8000, "of a request, in each simulation")
    given = options.parse_args(arguments)
    chance = random.Random(given.seed)
    times, batches = (
        json.loads((RESULTS / f"{name}.json").read_text())
        for name in ("cycle_times", "scale_batch")
    )
    results = {
        "by_batch": by_batch(given.cycles, chance),
        "by_context": by_context(),
        "by_devices": by_devices(),
        "against_measured": against_measured(times, batches, chance),
        "schedules": schedules(times, given.cycles, chance),
    }
    bench.report(__spec__.name, arguments, given, results, list(results))


if __name__ == "__main__":
    main()
