"""The pool asks a server's drafters, checks their drafts, and contains their faults.

A drafter may raise, or propose ids that do not exist; one from a file may hang, too (timed.py). The
request goes on without it, with its other drafters, and the answer stays the same. (By rejection
its distribution does. With --strict the request fails.)
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from runtime import plug
from runtime.values import Draft, Request, RequestError, TextSequence, Verdict, in_short

from .base import Drafter, first_choice
from .plan import DraftedText, Task, UnseenCycle, split_verdict

tree = plug("drafters.tree")  # without it drafts do not branch
checks = plug("drafters.checks")  # without it drafts are verified as they come

AUTO = "auto"  # a request's name for all drafters
TREE = "tree"  # for several at once, whose drafts are merged into one tree
_AGAIN_S = 0.001  # until it is looked again where all texts wait for their grammars
LOG = logging.getLogger("drafters")


class DrafterPool:
    """The drafters of a server."""

    def __init__(
        self, drafters: dict[str, Drafter], vocab_size: int, default: str | None = None,
        is_strict: bool = False, prefixes: Any = None, can_branch: bool = False,
    ) -> None:  # fmt: skip
        """`is_strict` lets a drafter's fault fail the request: for those who write a drafter.

        `prefixes` is the target's PrefixCache, which holds hidden states for drafters, too.
        `can_branch`: the target verifies trees. Raises ValueError if the default is a tree, and
        there can be none.
        """
        self.drafters, self.vocab_size, self.is_strict = drafters, vocab_size, is_strict
        self.prefixes, self.can_branch = prefixes, can_branch and tree is not None
        # What a request may ask for, and the drafters that this means: of several, the one to
        # begin with stands first.
        first = first_choice(drafters, default)
        self.choices = {name: (name,) for name in drafters}
        self.choices[AUTO] = tuple(sorted(drafters, key=lambda name: name != first))
        self.merging = set[str]()  # of these choices those whose drafters draft together
        self.special = {name for name, drafter in drafters.items() if drafter.needs}
        if self.can_branch and len(drafters) > 1:
            free = [name for name, drafter in drafters.items() if drafter.can_guess]
            model = first_choice({n: d for n, d in drafters.items() if n not in free}, default)
            self.choices[TREE] = (model, *free) if model else tuple(free)
            self.merging = {TREE}
        elif default == TREE:
            raise ValueError(
                "--drafter tree needs two drafters, and forwards in C of a model without recurrent "
                "layers"
            )
        self.failures: Counter[str] = Counter()  # of each drafter
        self.log = LOG  # of these failures
        self.num_late = 0  # times that a text sat out a pass, as its grammar was slow
        # Of the last `propose`, by what was asked for: steps of each request (mostly tokens), ms.
        self.spent: dict[str, tuple[list[int], float]] = {}

    def open(self, text: DraftedText) -> None:
        """Open the states of the drafters that a request names. With --strict, raises a fault."""
        request, failed = text.request, dict[str, Exception]()
        text.merge = request.drafter if request.drafter in self.merging else None
        for name in self.eligible(request):
            drafter = self.drafters[name]
            try:
                # Copies, because a drafter may change what it is given.
                given = list(request.prompt), request.drafting, copy(text.noise)
                state = text.states[name] = drafter.call("open", *given)
                drafter.attach(state, text)
            except Exception as error:
                failed[name] = error
        for name, error in failed.items():
            self.drop_drafter(text, name, "open", error)
        if text.failure:
            raise text.failure
        is_scored = request.prompt_logprobs is not None  # then all of the prompt has to be read
        if self.prefixes and not (request.isolated or is_scored):
            hidden = self.prefixes.restore(text.row, request.prompt, self.layers([text]))
            text.num_cached = self.prefixes.length(text.row)
            # Of no layers, too: what is read next does not begin at the text's first token.
            text.hidden = {0: hidden} if text.num_cached else {}

    def eligible(self, request: Request) -> list[str]:
        """The drafters that may draft for a request, the one to begin with first."""
        names = self.choices[request.drafter] if request.drafter else ()
        able = [name for name in names if self.drafters[name].is_for(request)]
        return sorted(able, key=lambda name: not self.drafters[name].leads)

    def layers(self, texts: list[DraftedText]) -> tuple[int, ...]:
        """The layers whose hidden states the drafters of these texts want."""
        present = {name for text in texts for name in text.states}
        return tuple(sorted({i for name in present for i in self.drafters[name].wanted_layers}))

    def close(self, text: DraftedText, is_early: bool = False) -> None:
        """Give the drafters' states back. With --strict, raises a fault in that, if not early."""
        told = text.failure
        for name in list(text.states):
            self._close(text, name)
        if text.failure is not told and not is_early:
            raise text.failure

    def _close(self, text: DraftedText, name: str) -> None:
        """Give a drafter's state back, if the text has it."""
        drafter = self.drafters[name]
        if drafter.keeps_outputs:
            self._catch_up(text, name)
        if name in text.states:
            try:
                drafter.call("close", text.states.pop(name))
            except Exception as error:
                text.warnings.append(self._fault(text, name, "close", "failed to close", error))

    def members(self, text: DraftedText, name: str | None) -> list[str]:
        """The text's drafters that draft where `name` is asked: one, or several together."""
        names = [name]
        if name in self.merging:
            names = self.choices[name] if self.can_grow(text) else list(text.states)[:1]
        return [member for member in names if member in text.states]

    def can_grow(self, text: DraftedText) -> bool:
        """Whether the text's drafts may branch."""
        return self.can_branch and text.request.sampling.is_coupled

    def propose(self, texts: list[DraftedText], tasks: list[Task]) -> list[Draft]:
        """A draft for each text, by its task.

        Drafters are called in turn, each for all texts that are to have a draft of it. A draft that
        was not judged, as the target's forward failed, is handed out again.
        """
        self.spent, waiting = {}, [text for text in texts if text.draft is None]
        for text, task in zip(texts, tasks, strict=True):
            if text.draft is None:
                text.task = task if task.limit else task._replace(drafter="")
                text.draft = Draft()
                text.drafts = dict.fromkeys(self.members(text, text.task.drafter), Draft())
        for name in dict.fromkeys(name for text in waiting for name in text.drafts):
            if group := [t for t in waiting if name in t.drafts and self._prepare_draft(t, name)]:
                began = time.perf_counter()
                drafts = self._ask(name, group)
                ms = (time.perf_counter() - began) * 1e3
                for text, draft in zip(group, drafts, strict=True):
                    text.drafts[name] = draft
                self._note(name, group, ms)
        for text in waiting:
            if text.drafts:
                drafts, limit = [*text.drafts.values()], text.task.limit
                draft = drafts[0] if len(drafts) == 1 else tree.merged(drafts, limit)
                text.take(draft)
        return [text.draft for text in texts]

    def _prepare_draft(self, text: DraftedText, name: str) -> bool:
        """Prepare a drafter for its part of a text's draft. Returns whether it is to be asked.

        A drafter that cannot begin with tokens that a grammar forces is not asked alone. A head
        cannot: it needs the target's states, and a drafted token has none.
        """
        if not self.prepare(text, name, text.task.limit):
            return False
        drafter, state, is_alone = self.drafters[name], text.states[name], len(text.drafts) == 1
        if drafter.stops_early:
            state.least_confidence = text.task.least_confidence
        if drafter.branches:
            state.tree = None if is_alone else tree.TreeBuilder
        can = drafter.accepts_forced_prefix or drafter.drafts_forced
        return can or not is_alone or not text.forced_tokens(text.task.limit)

    def prepare(self, text: DraftedText, name: str, most: int) -> bool:
        """Let a drafter observe what has come, and begin with what is forced, if it can.

        Returns whether the text still has this drafter.
        """
        self._catch_up(text, name)
        if name in text.states and self.drafters[name].accepts_forced_prefix:
            text.states[name].forced = text.forced_tokens(most)
        return name in text.states

    def _catch_up(self, text: DraftedText, name: str) -> None:
        """Let a drafter observe what came since it was asked last, as one piece of text."""
        drafter = self.drafters[name]
        if cycles := text.unseen.pop(name, None):
            with self.containing(text, name, "observe"):
                tokens = [token for cycle in cycles for token in cycle.tokens]
                hidden = drafter.hidden_of([cycle.hidden for cycle in cycles])
                verdict = Verdict(0, len(tokens) - 1, tokens, hidden)
                drafter.call("observe", text.states[name], verdict)

    def _ask(self, name: str, texts: list[DraftedText]) -> list[Draft]:
        """Drafts that can be verified; an empty one for a text that loses its drafter."""
        if len(texts) > 1 and self.drafters[name].is_asked_alone:
            return [self._ask(name, [text])[0] for text in texts]
        states, limits = [text.states[name] for text in texts], [text.task.limit for text in texts]
        asked = [(text.request, text.task.limit) for text in texts]
        size = self.vocab_size
        check = checks and partial(checks.checked_drafts, asked=asked, vocab_size=size)
        try:
            drafts = self.drafters[name].call("propose_batch", states, limits, then=check)
        except Exception as error:
            if len(texts) > 1:  # one of them is to blame, and the others need not suffer for it
                return [self._ask(name, [text])[0] for text in texts]
            self.drop_drafter(texts[0], name, "propose_batch", error)
            return [Draft()]
        pairs = zip(texts, drafts, strict=True)
        return [draft if self.can_grow(text) else draft.longest() for text, draft in pairs]

    def _note(self, name: str, texts: list[DraftedText], ms: float) -> None:
        """Note the cost of a call under what was asked for, if that is the same for all texts."""
        asked = {text.task.drafter for text in texts}
        what = name if len(asked) > 1 else asked.pop()
        # Tokens drafted, or asked for where none came, or where several draft together.
        is_several = what in self.merging
        drafted = [0 if is_several else len(text.drafts[name].tokens) for text in texts]
        counts = [n or text.task.limit for n, text in zip(drafted, texts, strict=True)]
        counts, before_ms = self.spent.get(what, (counts, 0.0))
        self.spent[what] = counts, before_ms + ms

    def settled(self, sequences: list[TextSequence]) -> list[TextSequence]:
        """Those whose drafts can be verified: their grammars have said what may come.

        A grammar may be slow: its text sits out a pass, and the others do not wait for it.
        """
        constrained = [s.drafting for s in sequences if s.drafting.matcher]
        for text in constrained:
            if text.draft is not None:
                text.matcher.explore(text.draft)
        began = time.monotonic()
        late = [text for text in constrained if not text.settle(began)]
        ready = [s for s in sequences if s.drafting not in late]
        if ready:
            self.num_late += len(late)
        elif late:
            time.sleep(_AGAIN_S)
        for s in ready:
            if s.drafting.matcher and s.drafting.matcher.has_ended:
                s.end()
        return [s for s in ready if not s.finish_reason]

    def observe(
        self, text: DraftedText, verdict: Verdict, hidden: dict[int, Tensor], is_last: bool = False
    ) -> None:
        """Hand the text's drafters the verdict; the last one only to those that keep outputs.

        The drafter that proposed observes it at once, and rolls back. The others observe all new
        text before they are asked next. `hidden` are the states [fed, D] of the verified tokens, by
        layer; of a tree, of the path that the text took.
        """
        num_dropped = verdict.drafted - verdict.accepted
        if num_dropped:  # views of all layers cost as much as all else here
            hidden = {layer: states[:-num_dropped] for layer, states in hidden.items()}
        # A prompt's chunks came before.
        came = [UnseenCycle([], states) for states in text.hidden.values()]
        came, judged = [*came, UnseenCycle(verdict.tokens, hidden)], text.draft
        text.hidden, text.draft, text.forced = {}, None, None
        states = [each.hidden for each in came]
        self.remember_prompt(text, states)
        for name, draft in text.drafts.items():
            if name not in text.states:
                continue
            drafter = self.drafters[name]
            drafter.count(text, draft, judged, verdict.tokens)
            if is_last and not drafter.keeps_outputs:
                continue
            with self.containing(text, name, "observe"):
                whole = replace(verdict, hidden=drafter.hidden_of(states))
                parts = [whole] if draft is judged else split_verdict(whole, draft)
                for part in parts:
                    drafter.call("observe", text.states[name], part)
        for name in text.states.keys() - text.drafts.keys():
            text.unseen.setdefault(name, []).extend(came)

    def remember_prompt(self, text: DraftedText, parts: list[dict[int, Tensor]]) -> None:
        """Note what was read last, states [tokens, D] by layer. The first of it is the prompt."""
        if self.prefixes and not text.request.isolated:
            text.states_read += parts
            if len(text.states_read) == len(parts):
                self.prefixes.remember(text.row, text.request.prompt, text.read())

    def remember(self, text: DraftedText, tokens: list[int]) -> None:
        """Keep a whole text, before its row is closed: it may come back as a prompt's beginning.

        A token has the same keys and values read or written where bits are equal, and only there.
        """
        if text.hidden:  # of a prompt behind which nothing was generated
            self.remember_prompt(text, [*text.hidden.values()])
        if text.states_read:
            self.prefixes.remember(text.row, tokens, text.read())

    @contextmanager
    def containing(self, text: DraftedText, name: str, method: str) -> Iterator[None]:
        """What goes wrong in here costs the text this drafter, and nothing else."""
        try:
            yield
        except Exception as error:
            self.drop_drafter(text, name, method, error)

    def drop_drafter(self, text: DraftedText, name: str, method: str, error: Exception) -> None:
        """The request goes on without this drafter; the log has the traceback."""
        what = self._fault(text, name, method, "failed", error)
        self._close(text, name)
        rest = " and ".join(text.states)
        text.warnings.append(f"{what}: went on {f'with {rest}' if rest else 'without speculation'}")
        if not rest:
            text.task = text.task._replace(decision=None)

    def _fault(self, text: DraftedText, name: str, method: str, how: str, error: Exception) -> str:
        """Count and log what a drafter did; with --strict it is to end the request. In a line."""
        self.failures[name] += 1
        self.log.warning("drafter %s %s: %s", name, how, in_short(error), exc_info=error)
        where = self.drafters[name].line_of(error, method)
        what = f"drafter {name} {how} ({in_short(error)}){where}"
        if self.is_strict:
            text.failure = RequestError(what, status=500, code="drafter_failed")
            text.failure.__cause__ = error
        return what

    def drop_all_drafters(self, text: DraftedText, why: str) -> None:
        """The request goes on without speculation."""
        text.task, text.draft = Task(), None
        text.warnings.append(f"{why}: went on without speculation")
        for name in list(text.states):
            self._close(text, name)
