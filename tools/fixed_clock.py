"""Does `auto` find the best drafter, on a machine whose costs are given and never vary?

Each demo prompt is generated twice by each drafter alone and by auto, all under the controller. The
models run, but a cycle is thought to take

    step_ms for each step of a model, and a twentieth of it for each token that it missed
    pass_ms + row_ms · rows, and other_ms

which the controller learns in place of what the clock says. So the times do not depend on how busy
the machine is, and a change of the controller by a percent can be seen. The prompt's time is left
out. `of_best` is auto's speed in that of the drafter that is best alone on that kind of prompt.

    python -m tools.fixed_clock [--pass-ms 1.4] [--row-ms 0.09] [--step-ms 0.5]
        [--other-ms 0.2] [--choice-ms 0] [--together 1] [--k 8] [--tokens 96] [--json]
        [--model DIR]
"""

import argparse
import random
from collections import Counter
from collections.abc import Collection
from typing import Any

from tqdm import tqdm

import tools as bench
from drafters.auto.planner import CHOSEN, Controller, Plan, Planner
from runtime.values import MAX_SPECULATIVE_TOKENS, Cycle, Draft, Engine, Request

_FREE_MS = 0.005  # a token of a drafter without a model
_READ_SHARE, _FEW = 0.05, 2  # of a step: a token that was missed; so many are read by the way


class FixedClock(Planner):
    """A planner whose cycles take what they are said to take."""

    def __init__(self, engine: Engine, prices: argparse.Namespace) -> None:
        """Plan by a new controller, which has learnt nothing."""
        controller = Controller.of(engine.target, engine.pool.drafters)
        super().__init__(controller, engine.pool)
        self.prices, self.ms = prices, 0.0

    def record_cycle(
        self, plan: Plan, drafts: list[Draft], cycles: Collection[Cycle], times: list[float] | None
    ) -> None:
        costs, prices, spent = self.controller.costs, self.prices, self._pool.spent
        for name, (counts, _) in spent.items():
            ms = _FREE_MS * sum(counts)
            if costs.runs_model(name):
                num_forwards = max(draft.num_forwards for draft in drafts)  # fewer in copies
                num_steps = 1 if name in costs.at_once else num_forwards or max(counts)
                missed = max(0, plan.unread[name] - _FEW)
                ms = prices.step_ms * (num_steps + _READ_SHARE * missed)
            spent[name] = counts, ms
        if times:
            size, rows = len(drafts), sum(len(draft.tokens) + 1 for draft in drafts)
            plan.choice_ms = prices.choice_ms * size * (plan.kind == CHOSEN)
            ms = prices.pass_ms + prices.row_ms * rows + prices.other_ms
            ms += sum(ms for _, ms in spent.values()) + plan.choice_ms
            self.ms += ms
            super().record_cycle(plan, drafts, cycles, [0.0, ms / 1e3])


def measure(engine: Engine, flags: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per kind of prompt, and one for all: ms of each drafter, as speed-ups."""
    prompts = bench.demo_prompts(engine)
    work = [(kind, ids) for kind, own in prompts.items() for ids in own.values()]
    size = flags.together
    names = [None, *bench.names_of(engine), bench.AUTO]
    spent = {name: Counter[str]() for name in names}
    for name in tqdm(names, desc="drafters", disable=None):
        clock = engine.planner = FixedClock(engine, flags)
        for turn in range(2):
            mixed = random.Random(turn).sample(work, len(work))
            for batch in (mixed[i : i + size] for i in range(0, len(mixed), size)):
                before = clock.ms
                ask = [Request(ids, flags.tokens, name, flags.k) for _, ids in batch]
                bench.run_together(engine, ask)
                spent[name][batch[0][0] if size == 1 else "all"] += clock.ms - before
    for own in spent.values():
        own["all"] = sum(own.values())  # of batches there is nothing else
    return [row_of(kind, {name: own[kind] for name, own in spent.items()}) for kind in spent[None]]


def row_of(kind: str, ms: dict[str | None, float]) -> dict[str, Any]:
    """How many times as fast as plain decoding each drafter is."""
    speedups = {name: round(ms[None] / own, 3) for name, own in ms.items() if name}
    best = max(1.0, *(own for name, own in speedups.items() if name != bench.AUTO))
    return {"prompts": kind} | speedups | {"of_best": round(speedups[bench.AUTO] / best, 3)}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__, runs=None)
    for name, ms in {"pass": 1.4, "row": 0.09, "step": 0.5, "other": 0.2}.items():
        options.add_argument(f"--{name}-ms", type=float, default=ms, help=f"({ms})")
    options.add_argument("--choice-ms", type=float, default=0.0, help="a request's part (0)")
    bench.add_count(options, "--together", 1, 16, 1, "requests")
    bench.add_count(options, "--k", 1, MAX_SPECULATIVE_TOKENS, 8, "draft tokens, at most")
    options.add_argument("--model", default="embedded", help="the target (default: %(default)s)")
    bench.add_count(options, "--tokens", 2, 1000, 96, "a request, at most")
    flags = options.parse_args(arguments)
    engine = bench.load_engine(model=flags.model, max_running=16)
    bench.report(__spec__.name, arguments, flags, {"results": measure(engine, flags)})


if __name__ == "__main__":
    main()
