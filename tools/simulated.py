"""Where does `auto` lose, on machines and texts that are made up?

No model runs, and no clock is read. A text is drawn by its kind: how long it becomes, how certain
the target is of each token, which ones a draft model gets right, and where n-gram finds a copy. A
machine is a curve: what a pass over so many rows takes, what a step of the draft model, and what a
token that this has to read. The planner is the server's. So a change of the controller is judged in
a minute, whatever else the machine at hand does, and a cell that loses can be looked at.

Clients ask one request after the other. With --in-a-row N so many texts of one kind follow each
other, so that what one kind taught meets another kind. Reading prompts is left out, but for the
draft model's. `worst` is of plain decoding, `of_best` of the fixed K, or none, that is best for
that kind: both of the kind that fares worst.

    python -m tools.simulated [--clients 1 4 8] [--machines pair memory experts]
        [--temperatures 0 0.8] [--rounds 20] [--in-a-row 1] [--seeds 3] [--json]
"""

import random
from collections import Counter
from itertools import product
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

import tools as bench
from drafters.auto.planner import CHOSEN, Controller, Planner
from drafters.pool import AUTO, Guess, Task
from runtime.values import Draft, Request, Sampling
from server.curve import Curve
from server.options import MOST_K

_WRONG = -1  # a token that no text has
_SAMPLED = 0.72  # of greedy text's accepted tokens, so many are accepted at temperature 0.8
_CHOICE_MS, _OTHER_MS = 0.05, 0.3  # of a choice for each request, and of a cycle
_SLOW = 0.01  # of the passes meet with something else that the machine does


class Kind(NamedTuple):
    """A kind of text."""

    length: int  # tokens, where max_tokens does not cut it
    prompt: int
    certainty: float  # the probability of the target's own token, on average, greedy
    copies: float  # the chance that a copied stretch begins at a token
    stretch: float  # how many tokens it has, on average


KINDS = {
    "code": Kind(96, 115, 0.93, 0.06, 6), "chat": Kind(96, 60, 0.65, 0.01, 3),
    "extraction": Kind(16, 201, 0.88, 0.05, 3), "translation": Kind(30, 80, 0.80, 0.01, 2),
    "question": Kind(15, 41, 0.76, 0.01, 2), "summary": Kind(90, 225, 0.85, 0.05, 4),
    "role": Kind(70, 90, 0.6, 0.01, 2), "list": Kind(96, 30, 0.8, 0.08, 4),
    "mathematics": Kind(96, 90, 0.9, 0.05, 4), "edit": Kind(96, 190, 0.95, 0.15, 12),
}  # fmt: skip
# Of texts of one kind: how far their certainty lies apart, and how far what a drafter gets right.
_SPREAD, _OTHERWISE = 0.06, 0.03
_MAX_TOKENS = 96
_FIXED = 1, 2, 3, 5  # tokens that are always drafted, to compare with


class Machine(NamedTuple):
    """What work takes, in ms."""

    rows: list[int]
    pass_ms: list[float]  # of a pass over so many rows
    step_ms: float  # of the draft model for one request
    read_ms: float  # of a token that the draft model has not read

    @property
    def curve(self) -> Curve:
        """What the controller is told of this machine before it begins."""
        price = {"call_ms": 0.0, "step_ms": self.step_ms, "read_ms": self.read_ms}
        measured = zip(self.rows, self.pass_ms, strict=True)
        return Curve(dict(measured), {"draft_model": price})

    def a_pass(self, rows: int) -> float:
        return float(np.interp(rows, self.rows, self.pass_ms))

    def a_step(self, requests: int) -> float:
        return self.step_ms * (1 + 0.09 * (requests - 1))


MACHINES = {
    # Qwen2.5-Coder 1.5B and 0.5B, Q4_K_M, on two cores of a Zen 5: measured up to 16 rows.
    "pair": Machine(
        [1, 2, 4, 6, 8, 16, 64, 128], [17.9, 19.7, 25.9, 30.3, 34.8, 64.2, 200, 380], 6.0, 0.9
    ),
    # Weights of float32, which memory is slow to bring; a mixture whose rows read other experts.
    "memory": Machine([1, 2, 4, 8, 16, 64], [20, 20.4, 21, 22, 25, 48], 6.0, 0.3),
    "experts": Machine([1, 2, 4, 8, 16, 64], [20, 30, 48, 75, 110, 220], 6.0, 0.6),
}


class Text:
    """A request under way, as the planner sees one of the core's sequences."""

    def __init__(self, name: str, temperature: float, chance: random.Random) -> None:
        """Draw a text of this kind."""
        kind, count = KINDS[name], _MAX_TOKENS + 20
        self.name, self.length, sampling = name, kind.length, Sampling(temperature=temperature)
        self.request = Request([0] * kind.prompt, _MAX_TOKENS, AUTO, MOST_K, sampling=sampling)
        mean = kind.certainty * (_SAMPLED if temperature else 1.0) + chance.gauss(0, _SPREAD)
        # A part of the tokens is nearly certain. With the pair .09 + .91 p of them are accepted.
        part, more = max(0.05, min(1.0, (mean - 0.55) / 0.43)), chance.gauss(0, _OTHERWISE)
        self.certainties = [
            chance.uniform(0.95, 1.0) if chance.random() < part else chance.uniform(0.15, 0.95)
            for _ in range(count)
        ]
        # Whether the draft model gets a token right, and how sure it is.
        self.is_right = [chance.random() < 0.09 + 0.91 * p + more for p in self.certainties]
        self.confidence = [
            0.5 * p + 0.5 * (chance.betavariate(6, 1) if right else chance.betavariate(2, 3))
            for p, right in zip(self.certainties, self.is_right, strict=True)
        ]
        self.copied = list[int]()  # how many tokens a copy that begins here has
        while len(self.copied) < count:
            is_copy = chance.random() < kind.copies
            length = 1 + int(chance.expovariate(1 / kind.stretch)) if is_copy else 0
            self.copied += range(length, 0, -1) if length else [0]
        self.truth = [chance.randrange(1 << 30) for _ in range(count)]  # its tokens, and some more
        self.tokens, self.num_steps, self.finish_reason = [*self.request.prompt], 0, None
        self.num_read = 0  # tokens that the draft model knows
        states = {"draft_model": None, "ngram": None}
        self.drafting = SimpleNamespace(
            states=states, drafts={}, draft=None, task=Task(), text=self, request=self.request,
            merge=None,
        )  # fmt: skip

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def remaining(self) -> int:
        return self.request.max_tokens - len(self.output)

    def guess(self, limit: int) -> Guess:
        """What n-gram proposes: a copy and two tokens too many, or a chance match."""
        at = len(self.output)
        if count := self.copied[at]:
            return Guess([*self.truth[at : at + count], _WRONG, _WRONG][:limit], 3)
        return Guess([_WRONG] * min(2, limit), 1) if self.truth[at] % 3 == 0 else Guess([])

    def draft(self, task: Task) -> Draft:
        """What the draft model proposes; behind a wrong token all is wrong, as sure as it is."""
        at, tokens, sure, is_right = len(self.output), list[int](), list[float](), True
        rule = task.stop_rule
        while len(tokens) < task.limit and not (tokens and rule and not rule(sure)):
            place = at + len(tokens)
            is_right = is_right and self.is_right[place]
            tokens.append(self.truth[place] if is_right else _WRONG)
            sure.append(self.confidence[place])
        return Draft(tokens, confidence=sure)

    def append(self, draft: Draft) -> Any:
        """Judge a draft, and append what stays. Returns what the planner reads of a cycle."""
        at, accepted = len(self.output), 0
        while accepted < len(draft.tokens) and draft.tokens[accepted] == self.truth[at + accepted]:
            accepted += 1
        kept = min(accepted + 1, self.length - at)
        emitted, is_whole = self.truth[at : at + kept], kept == accepted + 1
        self.tokens += emitted
        if len(self.output) >= self.length:
            self.finish_reason = "stop" if self.length < _MAX_TOKENS else "length"
        self.num_steps += 1
        return SimpleNamespace(
            number=self.num_steps - 1, num_accepted=min(accepted, kept), is_whole=is_whole,
            num_drafted=len(draft.tokens) if is_whole else kept, cached=len(self.tokens) - 1,
            tokens=[SimpleNamespace(id=token) for token in emitted], draft=draft, num_kept=kept,
            path=range(len(draft.tokens)), certainties=self.certainties[at : at + kept],
        )  # fmt: skip


class Simulated(Planner):
    """A planner whose cycles say themselves how certain the target was."""

    def certain(self, cycle: Any) -> list[float]:
        return cycle.certainties


class Server:
    """Serves texts, with or without drafts, and counts the ms that it takes."""

    merging = ()  # the rest of what the planner asks of a pool

    def __init__(
        self, machine: Machine, is_plain: bool, seed: int, fixed_k: int | None = None
    ) -> None:
        """With a `fixed_k` the draft model drafts so many tokens in each cycle."""
        self.machine, self.fixed_k, self.chance = machine, fixed_k, random.Random(seed)
        self.is_plain = is_plain
        self.spent: dict[str, tuple[list[int], float]] = {}
        weights = {"draft_model": int(1000 * machine.step_ms / machine.pass_ms[0]), "ngram": 0}
        self.planner = Simulated(Controller(1000, weights), self)  # type: ignore[arg-type]
        self.planner.controller.costs.start_from(machine.curve)
        self.ms, self.tokens, self.ms_of = 0.0, Counter[str](), Counter[str]()

    def members(self, text: Any, name: str | None) -> list[str]:
        return [name] if name else []

    def guess(self, text: Any, name: str, limit: int) -> Guess | None:
        return text.text.guess(limit) if name == "ngram" else None

    def open(self, text: Text) -> Text:
        if not self.is_plain:
            self.planner.open(text)
        return text

    def step(self, batch: list[Text]) -> None:
        """A cycle of these texts."""
        plan = None if self.is_plain else self.planner.plan(batch)
        has_prefill = not all(text.num_steps for text in batch)
        tasks = plan.tasks if plan else [self.fixed(text) for text in batch]
        drafts, draft_ms = self.propose(batch, tasks)
        pass_ms = self.machine.a_pass(sum(len(draft.tokens) + 1 for draft in drafts))
        is_slow = self.chance.random() < _SLOW
        pass_ms *= self.chance.uniform(1.5, 3.0) if is_slow else self.chance.uniform(0.98, 1.04)
        choice_ms = _CHOICE_MS * len(batch) if plan and plan.kind == CHOSEN else 0.0
        ms = draft_ms + pass_ms + choice_ms + _OTHER_MS
        cycles = [text.append(draft) for text, draft in zip(batch, drafts, strict=True)]
        if plan:
            for text, cycle in zip(batch, cycles, strict=True):
                self.planner.learn(plan, text, cycle)
            plan.choice_ms = choice_ms
            times = None if has_prefill else [0.0, draft_ms / 1e3, 0.0, ms / 1e3]
            self.planner.record_cycle(plan, drafts, cycles, times)
        self.ms += ms
        for text, cycle in zip(batch, cycles, strict=True):
            self.ms_of[text.name] += ms / len(batch)
            self.tokens[text.name] += cycle.num_kept
            if text.finish_reason and plan:
                self.planner.close(text)

    def fixed(self, text: Text) -> Task:
        """What is drafted without a planner."""
        most = min(self.fixed_k or 0, text.remaining - 1) if text.num_steps else 0
        return Task("draft_model", most) if most else Task()

    def propose(self, batch: list[Text], tasks: list[Task]) -> tuple[list[Draft], float]:
        """A draft for each text, and what all of them take."""
        drafts, counts, unread = list[Draft](), {"draft_model": list[int](), "ngram": []}, 0
        for text, task in zip(batch, tasks, strict=True):
            name = task.drafter if task.limit else ""
            draft = Draft()
            if name == "draft_model":
                draft = text.draft(task)
                unread += max(0, len(text.tokens) - text.num_read - 2)
                text.num_read = len(text.tokens)
            elif name:
                draft = Draft(text.guess(task.limit).tokens)
            if name:
                counts[name].append(max(1, len(draft.tokens)))
            text.drafting.task = task._replace(drafter=name)
            text.drafting.drafts = {name: draft} if name else {}
            drafts.append(draft)
        steps = counts["draft_model"]
        ms = self.machine.read_ms * unread + sum(
            self.machine.a_step(sum(count > i for count in steps))
            for i in range(max(steps, default=0))
        )
        spent = {"draft_model": (steps, ms), "ngram": (counts["ngram"], 0.02 * len(batch))}
        self.spent = {name: each for name, each in spent.items() if each[0]}
        return drafts, sum(ms for _, ms in self.spent.values())


def asked(rounds: int, in_a_row: int, chance: random.Random) -> list[str]:
    """The kinds of the texts in an order by chance, so many of each kind in a row."""
    kinds = [kind for kind in KINDS for _ in range(rounds // in_a_row)]
    return [kind for kind in chance.sample(kinds, len(kinds)) for _ in range(in_a_row)]


def serve(server: Server, clients: int, temperature: float, flags: Any, seed: int) -> Server:
    """Let a server answer all texts."""
    chance = random.Random(seed)
    waiting = asked(flags.rounds, flags.in_a_row, chance)[::-1]
    running = list[Text]()
    while waiting or running:
        while waiting and len(running) < clients:
            running.append(server.open(Text(waiting.pop(), temperature, chance)))
        server.step(running)
        running = [text for text in running if not text.finish_reason]
    return server


def run(machine: Machine, clients: int, temperature: float, flags: Any, seed: int) -> Any:
    """The speed of `auto` in that of plain decoding, in all and by kind; and in the best way's."""
    what = clients, temperature, flags, seed
    auto, plain = (serve(Server(machine, way, seed), *what) for way in (False, True))
    ways = [serve(Server(machine, True, seed, k), *what) for k in _FIXED] + [plain]
    best = {kind: min(way.ms_of[kind] for way in ways) for kind in KINDS}
    of_plain = {kind: plain.ms_of[kind] / auto.ms_of[kind] for kind in KINDS}
    return plain.ms / auto.ms, of_plain, {k: best[k] / auto.ms_of[k] for k in KINDS}


def measure(flags: Any) -> list[dict[str, Any]]:
    """A row for each machine, number of clients and temperature."""
    cells = product(flags.machines, flags.clients, flags.temperatures)
    rows = []
    for machine, clients, temperature in tqdm([*cells], desc="cells", disable=None):
        what = MACHINES[machine], clients, temperature, flags
        ratios, *found = zip(*(run(*what, seed) for seed in range(flags.seeds)), strict=True)
        row = {"machine": machine, "clients": clients, "temperature": temperature}
        row["speedup"] = round(fmean(ratios), 3)
        for name, kinds in zip(("worst", "of_best"), found, strict=True):
            of_kind = {kind: fmean(each[kind] for each in kinds) for kind in KINDS}
            least = min(of_kind, key=lambda kind: of_kind[kind])
            row |= {f"{name}_kind": least, name: round(of_kind[least], 3)}
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__, runs=None)
    options.add_argument("--machines", nargs="+", choices=MACHINES, default=[*MACHINES])
    options.add_argument("--clients", nargs="+", type=int, default=[1, 4, 8])
    options.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    bench.add_count(options, "--rounds", 1, 1000, 20, "texts of each kind")
    bench.add_count(options, "--in-a-row", 1, 1000, 1, "texts of one kind, one after the other")
    bench.add_count(options, "--seeds", 1, 100, 3, "runs, each of other texts")
    flags = options.parse_args(arguments)
    bench.report(__spec__.name, arguments, flags, {"results": measure(flags)})


if __name__ == "__main__":
    main()
