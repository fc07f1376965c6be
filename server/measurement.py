"""Measures the cost curve in idle time, by cycles of the engine itself.

    start            the curve of an earlier start is used at once, if there is one
    nobody waits     measure(): one more cycle of a text of its own, by the engine's `step`
    a request comes  pause(): what the text holds is given back; later the measurement goes on
    the end          the curve is stored, with what was faster at the earlier start, and told to
                     the controller

Every number of rows and every drafter has three turns, of which the first one warms up. What else
the machine does only adds to a time, so the shortest one counts. Not measured: passes so large that
a request would wait long for their end, drafters from files, and those that run no model. No
statistics count these cycles, and nothing is remembered of their text.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime

from drafters.pool import AUTO, Task
from runtime import kernels
from runtime.values import Draft, Engine, Json, Request, TextSequence, in_short

from .curve import LOG, PARTS, ROWS, Curve, Store
from .warming import uncounted

_LONGEST_PASS_MS = 750.0  # a request may come meanwhile
_TURNS = 3
_SHORT, _LONG = 1, 5  # tokens of drafts
_UNREAD = 4  # tokens: a draft behind so many more is one that reads
_PROMPT, _IDS = 16, range(300, 900)  # tokens; ids, which are mostly of frequent words
_ROOM = 20  # tokens that drafts and what is read of them take


class Measurement:
    """Measures the curve of an engine, in the thread that runs it. Other threads may read it."""

    def __init__(self, engine: Engine, fingerprint: str | None) -> None:
        """`fingerprint` is the target's; without one nothing is stored."""
        self._engine, self.is_done = engine, False
        models = {n: d for n, d in engine.pool.drafters.items() if not d.is_from_file}
        sizes = {name: drafter.num_step_weights for name, drafter in models.items()}
        self._names = [name for name, size in sizes.items() if size]
        self._ids = [i % engine.target.vocab_size for i in _IDS]
        self._prompt = self._ids[: min(_PROMPT, max(1, engine.target.max_length // 4))]
        self._text: TextSequence | None = None
        self._read: dict[str, int] = {}  # tokens of the text, by drafter
        # Cycles to come: a drafter, or "" for any tokens, and how many of them are verified.
        cycles = [("", rows - 1) for rows in ROWS]
        cycles += [(name, count) for name in self._names for count in (_SHORT, _LONG)]
        self._left = deque(cycles * _TURNS)
        self._passes: dict[int, list[float]] = defaultdict(list)
        # By drafter and tokens asked for, (ms, steps); by drafter, (ms, tokens that it first read).
        self._drafts: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
        self._reads: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self._began, self._context = datetime.now(UTC).isoformat(timespec="seconds"), 0
        self._store = Store(engine, fingerprint, sizes)
        self.curve, self.status = Curve(), "measuring"
        self._stored = self._store.read()
        if self._stored.pass_ms:
            self._tell(self._stored, "stored")

    def as_dict(self) -> Json:
        """The body of GET /curve."""
        curve, status = self.curve, self.status
        return asdict(curve) | {"break_even": curve.break_even, "status": status}

    def measure(self) -> None:
        """Run a cycle, until all is measured."""
        status, is_done = self.status, False
        try:
            with self._uncounted() as twin:
                if not self._cycle(twin):
                    is_done, status = True, "measured"
        except Exception as error:
            LOG.warning("the cost curve is not measured any further: %s", in_short(error))
            is_done = True
        if is_done:
            self.pause()
        if status != "stored":
            self._tell(self._known(), status)
        self.is_done = is_done  # last: who hears of it finds nothing held, and all told

    def pause(self) -> None:
        """Give back what the text holds, and store what is known: a request comes."""
        if self._text is not None:
            text, self._text = self._text, None
            self._store.write(self._known())
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
        twin = uncounted(self._engine)
        with kernels.exclusive():
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
        else:
            while self._left and not self._is_possible(*self._left[0]):
                self._left.popleft()
            if not self._left:
                return False
            if s.finish_reason or len(s.tokens) + self._left[0][1] + 2 > length:
                self.pause()
            else:
                self._take(twin, s, *self._left.popleft())
        if s.failure:
            raise s.failure
        return True

    def _is_possible(self, name: str, count: int) -> bool:
        """Whether a cycle fits into the context, and ends soon enough if a request comes."""
        target = self._engine.target
        room = target.max_length - len(self._prompt) - 2
        for layer in target.cache.recurrent:  # nothing is accepted, and states go back so far
            room = min(room, layer.most_recorded)
        if name:
            return name in self._names and room >= _ROOM
        smaller = [(rows, times[-1]) for rows, times in self._passes.items() if rows <= count + 1]
        rows, ms = max(smaller, default=(1, 0.0))
        return count < room and ms * (count + 1) / rows <= _LONGEST_PASS_MS

    def _take(self, twin: Engine, s: TextSequence, name: str, count: int) -> None:
        """Measure a cycle with a draft of `count` tokens: a drafter's, or "" for any tokens."""
        text, begin = s.drafting, len(s.tokens)
        # The engine verifies a draft that waits, and asks nobody for one.
        ids = [self._ids[(begin + i) % len(self._ids)] for i in range(count)]
        text.draft, text.drafts, text.task = Draft(ids), {}, Task()
        if name:
            unread = begin - self._read.get(name, 0)
            if is_reader := unread > _UNREAD:  # which is measured first
                self._left.appendleft((name, count))
                count = _SHORT
            text.draft, began = None, twin.now()
            (draft,) = twin.pool.propose([text], [Task(name, count)])
            ms = (twin.now() - began) * 1e3
            if not draft.tokens:
                self._names.remove(name)  # it failed
            elif is_reader:
                self._reads[name].append((ms, unread))
            else:
                self._drafts[name, count].append((ms, draft.num_forwards or len(draft.tokens)))
        if cycle := twin.step([s]).get(s):
            self._read[name] = len(s.tokens)
            self._context = max(self._context, begin)
            pass_ms = (cycle.times[-1] - cycle.times[1]) * 1e3
            self._passes[len(cycle.draft.tokens) + 1].append(pass_ms)

    def _known(self) -> Curve:
        """The curve as far as it is known, with what was faster at an earlier start."""
        taken = ((rows, self._passes[rows]) for rows in ROWS if rows in self._passes)
        passes = {rows: round(_shortest(times), 4) for rows, times in taken}
        drafters = dict[str, dict[str, float]]()
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
        # The context had half of its greatest length on average.
        return Curve(passes, drafters, self._began, self._context // 2).least(self._stored)


def _shortest(values: list[float]) -> float:
    """The shortest; the first one warmed up, and counts only if it is alone."""
    return min(values[1:] or values)
