"""Measures the cost curve in idle time, by cycles of the engine itself.

    start            the curve of an earlier start is used at once, if there is one
    nobody waits     measure(): one more cycle of a text of its own, by the engine's `step`
    a request comes  pause(): what the text holds is given back; later the measurement goes on
    the end          the curve is stored, with what was faster at the earlier start, and told to
                     the controller

No statistics count these cycles, and nothing is remembered of their text. What costs little is
measured most often. All is measured at least once, in later idle times if need be, but for passes
so large that a request would wait long for their end. What else the machine does only adds to a
time, so the shortest counts. Not measured: drafters from files, and those that run no model.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from math import inf

from drafters.pool import AUTO, Task
from drafters.timed import TimedDrafter
from runtime import kernels
from runtime.cache.states import MOST_RECORDED
from runtime.values import Draft, Engine, Json, Request, TextSequence, in_short

from .curve import LOG, PARTS, ROWS, Curve, Store
from .worker import uncounted

_LONGEST_MS = 1500.0  # of measuring more than once, in all, without waiting for a core
_LONGEST_PASS_MS = 750.0  # a request may come meanwhile
_TIMES = 4  # each; the first time warms up
_SHORT, _LONG = 1, 5  # tokens of drafts
_UNREAD = 4  # tokens: a draft behind so many more is one that reads
_PROMPT, _IDS = 16, range(300, 900)  # tokens; ids, which are mostly of frequent words
_ROOM = 20  # tokens that drafts and what is read of them take


class Measurement:
    """Measures the curve of an engine, in the thread that runs it. Other threads may read it."""

    def __init__(self, engine: Engine, fingerprint: str | None) -> None:
        """`fingerprint` is the target's; without one nothing is stored."""
        self._engine, self.left_ms, self.is_done = engine, _LONGEST_MS, False
        models = {n: d for n, d in engine.pool.drafters.items() if not isinstance(d, TimedDrafter)}
        sizes = {name: drafter.num_step_weights for name, drafter in models.items()}
        self._names = [name for name, size in sizes.items() if size]
        self._ids = [i % engine.target.vocab_size for i in _IDS]
        self._prompt = self._ids[: min(_PROMPT, max(1, engine.target.max_length // 4))]
        self._text: TextSequence | None = None
        self._read: dict[str, int] = {}  # tokens of the text, by drafter
        # Drafters, or "", and how much they draft: cycles to come.
        self._planned: deque[tuple[str, int]] = deque()
        self._passes: dict[int, list[float]] = defaultdict(list)
        # By drafter and tokens asked for, (ms, steps); by drafter, (ms, tokens that it first read).
        self._drafts: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
        self._reads: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self._contexts: list[int] = []
        self._store = Store(engine, fingerprint, sizes)
        self.curve, self.status = Curve(), "measuring"
        self._stored = self._store.read() or Curve()
        if self._stored.pass_ms:
            self._tell(self._stored, "stored")

    def as_dict(self) -> Json:
        """The body of GET /curve."""
        curve, status = self.curve, self.status
        return asdict(curve) | {"break_even": curve.break_even, "status": status}

    def measure(self) -> None:
        """Run a cycle, until all is measured."""
        began, is_whole = time.thread_time(), False
        try:
            with self._uncounted() as twin:
                is_whole = not self._cycle(twin)
            self.left_ms -= (time.thread_time() - began) * 1e3
        except Exception as error:
            LOG.warning("the cost curve is not measured any further: %s", in_short(error))
            self.is_done = True
        if is_whole or self.is_done:  # who hears of it finds nothing held any more
            self.pause()
        if is_whole:
            self._store.write(curve := self._known().least(self._stored))
            self._tell(curve, "measured")
        elif self.status == "measuring":
            self._tell(self._known(), "measuring")
        self.is_done |= is_whole

    def pause(self) -> None:
        """Give back what the text holds: a request comes."""
        if self._text is not None:
            text, self._text = self._text, None
            if not self.is_done:  # a later start goes on from it
                self._store.write(self._known().least(self._stored))
            self._planned.clear()
            try:
                with self._uncounted() as twin:
                    twin.close(text)
            except Exception as error:
                LOG.warning("the text of the cost curve was not closed: %s", in_short(error))

    def _tell(self, curve: Curve, status: str) -> None:
        self.curve, self.status = curve, status
        if self._engine.controller and curve.pass_ms:
            self._engine.controller.costs.start_from(curve)

    @contextmanager
    def _uncounted(self) -> Iterator[Engine]:
        """The engine for texts that never end, with which the drafters named here read along."""
        with uncounted(self._engine) as twin, kernels.exclusive():
            twin.eos_ids, choices = frozenset(), twin.pool.choices
            twin.pool.choices = choices | {AUTO: tuple(self._names)}
            yield twin

    def _cycle(self, twin: Engine) -> bool:
        """Open the text, let it be read, or measure once. Returns whether there was anything."""
        length, s = twin.target.max_length, self._text
        if s is None:
            request = Request(self._prompt, length - len(self._prompt), AUTO, isolated=True)
            self._text, self._read = (s := twin.open(request)), {}
        if not s.num_steps:
            twin.step([s])
        elif not (self._planned or self._plan()):
            return False
        elif s.finish_reason or len(s.tokens) + self._planned[0][1] + 2 > length:
            self.pause()
        else:
            self._take(twin, s, *self._planned.popleft())
        if s.failure:
            raise s.failure
        return True

    def _plan(self) -> bool:
        """Plan what took the least time so far, of what there is time for; False if nothing is."""
        target = self._engine.target
        length = target.max_length - len(self._prompt) - 2
        if target.cache.recurrent:  # nothing is accepted, and states do not go back further
            length = min(length, MOST_RECORDED)
        taken = {n: len(self._passes[n]) for n in ROWS if n <= length}
        if _ROOM <= length:
            taken |= {name: len(self._drafts[name, _LONG]) for name in self._names}
        costs = {n: self._expected_ms(n) for n, count in taken.items() if count < _TIMES}
        costs = {
            n: ms for n, ms in costs.items()
            if ms <= max(0.0, self.left_ms)
            or not taken[n] and (isinstance(n, str) or ms <= _LONGEST_PASS_MS)
        }  # fmt: skip
        if costs:  # so far, and for one cycle more
            chosen = min(costs, key=lambda n: costs[n] * (taken[n] + 1 / len(_cycles(n))))
            self._planned += _cycles(chosen)
        return bool(costs)

    def _expected_ms(self, what: int | str) -> float:
        """How long it takes, or at most takes: a pass over so many rows, or a drafter's cycles."""
        if isinstance(what, int):
            known = [(n, times[-1]) for n, times in self._passes.items() if times and n <= what]
            rows, ms = max(known, default=(1, 0.0))
            return ms * what / rows
        drafts = [taken[-1][0] for each in _cycles(what) if (taken := self._drafts[each])]
        return sum(drafts) + sum(self._expected_ms(count + 1) for _, count in _cycles(what))

    def _take(self, twin: Engine, s: TextSequence, name: str, count: int) -> None:
        """Measure a cycle with a draft of `count` tokens: a drafter's, or "" for any tokens."""
        text, begin = s.drafting, len(s.tokens)
        # The engine verifies a draft that waits, and asks nobody for one.
        ids = [self._ids[(begin + i) % len(self._ids)] for i in range(count)]
        text.draft, text.drafts, text.task = Draft(ids), {}, Task()
        if name:
            text.draft, began = None, twin.now()
            (draft,) = twin.pool.propose([text], [Task(name, count)])
            ms, unread = (twin.now() - began) * 1e3, begin - self._read.get(name, 0)
            if not draft.tokens:  # it failed
                self._names.remove(name)
                self._planned.clear()
            elif unread > _UNREAD:
                self._reads[name].append((ms, unread))
            else:
                self._drafts[name, count].append((ms, draft.num_forwards or len(draft.tokens)))
        if cycle := twin.step([s]).get(s):
            self._read[name] = len(s.tokens)
            self._contexts.append(begin)
            pass_ms = (cycle.times[-1] - cycle.times[1]) * 1e3
            self._passes[len(cycle.draft.tokens) + 1].append(pass_ms)

    def _known(self) -> Curve:
        """The curve as far as it is known."""
        passes, least, drafters = dict[int, float](), inf, dict[str, dict[str, float]]()
        for rows in reversed(ROWS):  # what took longer than a larger pass met with an accident
            if times := self._passes[rows]:
                passes[rows] = least = min(least, round(_shortest(times), 4))
        for name in self._names:
            short, long = self._drafts[name, _SHORT], self._drafts[name, _LONG]
            if short and long:
                first_ms = _shortest([ms for ms, _ in short])
                # A draft that copies text may be one step; a call alone is next to nothing.
                steps = [(ms - first_ms) / (n - 1) for ms, n in long if n > 1] or [first_ms]
                step_ms = min(first_ms, max(0.0, _shortest(steps)))
                # Of many tokens: a few are read along at next to no cost.
                many = [each for each in self._reads[name] if each[1] >= len(self._prompt)]
                reads = [(ms - first_ms) / unread for ms, unread in many]
                parts = first_ms - step_ms, step_ms, max(0.0, _shortest(reads or [0.0]))
                drafters[name] = {part: round(ms, 4) for part, ms in zip(PARTS, parts, strict=True)}
        now = datetime.now(UTC).isoformat(timespec="seconds")
        context = max(self._contexts, default=0) // 2  # on average
        return Curve(dict(sorted(passes.items())), drafters, now, context)


def _cycles(what: int | str) -> list[tuple[str, int]]:
    """What measures it. A drafter reads first what has come since its last draft."""
    if isinstance(what, int):
        return [("", what - 1)]
    return [(what, _SHORT), (what, _SHORT), (what, _LONG)]


def _shortest(values: list[float]) -> float:
    """The shortest; the first one warmed up, and counts only if it is alone."""
    return min(values[1:] or values)
