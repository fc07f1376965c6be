"""The panel asks a server's drafters, checks their drafts, and contains their faults.

A drafter may be wrong or broken in any way: it raises, hangs, or proposes ids that do not exist.
After such a fault its request goes on without that drafter, and the answer stays the same. (With
--strict the request fails.) The request's other drafters go on.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cache.prefix import PrefixCache
from kernels import KernelForward
from messages import Draft, RequestError, Sampling, Verdict, in_short
from sampling import Noise

from .base import Drafter, settings_kept
from .timed import TimedDrafter
from .tree import heard, longest, merged

AUTO = "auto"  # a request's name for all drafters
TREE = "tree"  # for several at once, whose drafts are merged into one tree
PLAIN = "none"  # for no drafter
_MOST_EVIDENCE = 8
LOG = logging.getLogger("drafters")


@dataclass(eq=False)
class Seat:
    """Drafting for one request: the drafters that read along, and what is known of them."""

    prompt: list[int]
    sampling: Sampling
    row: int = -1  # in the target's KV cache
    is_alone: bool = False  # neither uses what other requests left, nor leaves anything to them
    states: dict[str, Any] = field(default_factory=dict)  # by drafter, without those that failed
    asked: str | None = None  # who was to draft in this cycle
    num_asked: int = 0  # and how many tokens at most
    goes_on: Callable[[list[float]], bool] | None = None  # of the planner (see ModelState)
    guesses: dict[str, "Guess"] = field(default_factory=dict)  # in this cycle, by drafter
    drafts: dict[str, Draft] = field(default_factory=dict)  # what each one proposed
    draft: Draft | None = None  # what was proposed and is not judged yet
    missed: dict[str, list["Missed"]] = field(default_factory=dict)  # what each was not told yet
    records: dict[str, Any] = field(default_factory=dict)  # the planner's, by drafter
    decision: Any = None  # the planner's last one
    pace: Any = None  # the planner's: how fast the text comes
    most: int = 0  # the planner's: how many tokens may be drafted now
    warnings: list[str] = field(default_factory=list)
    failure: Exception | None = None  # where a drafter's fault is to end the request
    num_cached: int = 0  # tokens of the prompt that were known already
    # Of chunks of a prompt that are read, by the position of their first token.
    hidden: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    # Of the text since its beginning, one after the other: states [tokens, D] by layer.
    states_read: list[dict[int, Tensor]] = field(default_factory=list)


def joined(parts: list[dict[int, Tensor]]) -> dict[int, Tensor]:
    """States [tokens, D] by layer, of the layers that all parts have."""
    first, *others = parts
    layers = [layer for layer in first if all(layer in part for part in others)]
    return {layer: torch.cat([part[layer] for part in parts]) for layer in layers}


class Missed(NamedTuple):
    """What came in a cycle; drafters without a part in it are told before they are asked next."""

    tokens: list[int]
    hidden: dict[int, Tensor]  # [tokens, D] by layer


class Guess(NamedTuple):
    """What a drafter would have proposed, if it had been asked."""

    tokens: list[int]
    evidence: int = 0  # proposals of one number share a record


class Panel:
    """The drafters of a server."""

    def __init__(
        self,
        drafters: dict[str, Drafter],
        vocab_size: int,
        default: str | None = None,
        is_strict: bool = False,
        prefixes: PrefixCache | None = None,
        fast: KernelForward | None = None,
    ) -> None:
        """`is_strict` lets a drafter's fault fail the request: for those who write a drafter.

        `prefixes` are the target's: what it knows of a prompt, the drafters read along.
        `fast` is the target's forward in C, if any, which can verify a tree. Raises
        ValueError if the default needs that.
        """
        self.drafters, self._vocab_size, self._is_strict = drafters, vocab_size, is_strict
        self.prefixes = prefixes
        # What a request may ask for, and the drafters that this means: of several, the one to
        # begin with stands first.
        first = default if default in drafters else first_choice(drafters)
        every = dict.fromkeys([first, *drafters] if drafters else ())
        self.choices = {name: (name,) for name in drafters} | {AUTO: tuple(every)}
        self.can_branch = bool(fast and fast.can_branch)
        free = [name for name, drafter in drafters.items() if hasattr(drafter, "guess")]
        models = [name for name in every if name not in free]
        if self.can_branch and len(drafters) > 1:
            self.choices[TREE] = (*models[:1], *free)
        elif default == TREE:
            raise ValueError(
                "--drafter tree needs two drafters, and forwards in C of a model without recurrent "
                "layers"
            )
        self.failures: Counter[str] = Counter()  # of each drafter
        # Of the last `propose`, by who drafted: steps by request (as a rule tokens), and ms.
        self.spent: dict[str, tuple[list[int], float]] = {}

    def _call(self, name: str, method: str, *given: Any) -> Any:
        """Call a drafter's method. Ours leave torch's settings alone, and are called often."""
        call = getattr(self.drafters[name], method)
        is_ours = type(self.drafters[name]).__module__.startswith("drafters.")
        return (call if is_ours else settings_kept()(call))(*given)

    def open(self, seat: Seat, names: Iterable[str], prompt: list[int], noise: Noise) -> None:
        """Let these drafters read along with a new request."""
        failed: dict[str, Exception] = {}
        for name in names:
            try:
                seat.states[name] = self._call(name, "open", prompt, seat.sampling, noise)
                if self.drafters[name].shares_cache:
                    seat.states[name].row = seat.row
                if hasattr(seat.states[name], "is_alone"):
                    seat.states[name].is_alone = seat.is_alone
            except Exception as error:
                failed[name] = error
        for name, error in failed.items():
            self._lose(seat, name, "open", error)
        if self.prefixes and not seat.is_alone:
            hidden = self.prefixes.restore(seat.row, prompt, self.layers([seat]))
            seat.num_cached = self.prefixes.length(seat.row)
            # Of no layers, too: what is read next does not begin at the text's first token.
            seat.hidden = {0: hidden} if seat.num_cached else {}

    def remember_prompt(self, seat: Seat, states: dict[int, Tensor]) -> None:
        """Remember a prompt, once it has been read, and note the states [tokens, D] by layer."""
        if self.prefixes and not seat.is_alone:
            if not seat.states_read:
                self.prefixes.remember(seat.row, seat.prompt, states)
            seat.states_read.append(states)

    def remember(self, seat: Seat, text: list[int]) -> None:
        """Keep a whole text, before its row is closed: it may come back as a prompt's beginning.

        A token has the same keys and values read or written where bits are equal, and only there.
        """
        if seat.states_read:
            self.prefixes.remember(seat.row, text, joined(seat.states_read))

    def layers(self, seats: list[Seat]) -> tuple[int, ...]:
        """The layers whose hidden states the drafters of these seats want."""
        present = {name for seat in seats for name in seat.states}
        wanted = [d.hidden_layers for name in present if (d := self.drafters[name]).needs_hidden]
        return tuple(sorted({layer for layers in wanted for layer in layers}))

    def propose(self, seats: list[Seat], plan: list[tuple[str, int]]) -> list[Draft]:
        """A draft for each seat; plan[i] says who makes it and how many tokens it may have.

        Drafters are called in turn, each for all seats that are to have a draft of it. A draft that
        was not judged, as the target's forward failed, is handed out again.
        """
        self.spent, waiting = {}, [seat for seat in seats if seat.draft is None]
        for seat, (name, limit) in zip(seats, plan, strict=True):
            if seat.draft is None:
                seat.asked, seat.num_asked = (name, limit) if limit else (None, 0)
                seat.draft = Draft()
                seat.drafts = dict.fromkeys(self.members(seat, seat.asked), Draft())
        for name in dict.fromkeys(name for seat in waiting for name in seat.drafts):
            for seat in waiting:
                if name in seat.drafts:
                    self._catch_up(seat, name)
            group = [seat for seat in waiting if name in seat.drafts and name in seat.states]
            if not group:
                continue
            for seat in group if self.drafters[name].branches else ():
                seat.states[name].can_branch = len(seat.drafts) > 1
            began = time.perf_counter()
            drafts = self._ask(name, group)
            ms = (time.perf_counter() - began) * 1e3
            for seat, draft in zip(group, drafts, strict=True):
                seat.drafts[name] = draft
            self._note(name, group, ms)
        for seat in waiting:
            if seat.drafts:
                seat.draft = merged(list(seat.drafts.values()), seat.num_asked)
        return [seat.draft for seat in seats]

    def can_grow(self, seat: Seat) -> bool:
        """Whether the seat's drafts may branch."""
        return self.can_branch and seat.sampling.is_coupled

    def members(self, seat: Seat, asked: str | None) -> list[str]:
        """Who drafts, of those at the seat, where one of them is asked, or all for a tree."""
        if asked != TREE:
            return [asked] if asked else []
        names = [name for name in self.choices.get(TREE, ()) if name in seat.states]
        return names if names and self.can_grow(seat) else list(seat.states)[:1]

    def _note(self, name: str, seats: list[Seat], ms: float) -> None:
        """Note what a call of a drafter took; who drafts for a tree alone is counted as that."""
        if all(seat.asked == TREE for seat in seats):
            counts, before_ms = self.spent.get(TREE, ([seat.num_asked for seat in seats], 0.0))
            self.spent[TREE] = counts, before_ms + ms
        else:  # forwards of a model, or tokens drafted, or asked for where none came
            drafts = [seat.drafts[name] for seat in seats]
            counts = [
                draft.num_forwards or len(draft.tokens) or seat.num_asked
                for draft, seat in zip(drafts, seats, strict=True)
            ]
            self.spent[name] = counts, ms

    def _ask(self, name: str, seats: list[Seat]) -> list[Draft]:
        """Drafts that can be verified; an empty one for a seat that loses its drafter."""
        try:
            states = [seat.states[name] for seat in seats]
            if self.drafters[name].stops_early:
                for state, seat in zip(states, seats, strict=True):
                    state.goes_on = seat.goes_on
            limits = [seat.num_asked for seat in seats]
            proposed = self._call(name, "propose_batch", states, limits)
            if not isinstance(proposed, list) or len(proposed) != len(seats):
                raise ValueError("propose_batch has to return a list of one Draft for each state")
        except Exception as error:
            if len(seats) > 1:  # one of them is to blame, and the others need not suffer for it
                return [self._ask(name, [seat])[0] for seat in seats]
            self._lose(seats[0], name, "propose_batch", error)
            return [Draft()]
        sound = []
        for seat, draft in zip(seats, proposed, strict=True):
            try:
                self._check(draft, seat.num_asked, seat.sampling)
                sound.append(draft if self.can_grow(seat) else longest(draft))
            except Exception as error:
                self._lose(seat, name, "propose_batch", error)
                sound.append(Draft())
        return sound

    def _check(self, draft: Draft, limit: int, sampling: Sampling) -> None:
        if not isinstance(draft, Draft):
            kind = type(draft).__name__
            raise TypeError(f"propose returned a {kind}: write return Draft(tokens)")
        self._check_tokens(draft.tokens)
        count = len(draft.tokens)
        if count > limit:
            raise ValueError(f"{count} tokens proposed, {limit} asked for")
        sure = draft.confidence
        if sure and not (len(sure) == count and all(0 <= chance <= 1 for chance in sure)):
            raise ValueError("confidence is not one number from 0 to 1 for each token")
        is_read = draft.probs is not None and not sampling.is_coupled
        if draft.parents is not None:
            parents = list(draft.parents)
            if len(parents) != count or not all(-1 <= p < i for i, p in enumerate(parents)):
                raise ValueError(f"parents {parents!r:.100} for {count} tokens")
            if is_read:
                raise ValueError("drawn tokens that branch cannot be judged by rejection")
        if count and is_read:
            if draft.probs.shape != (count, self._vocab_size):
                raise ValueError(f"probs of shape {[*draft.probs.shape]} for {count} tokens")
            drawn = draft.probs[range(count), draft.tokens]
            off = (draft.probs.sum(-1) - 1).abs().max()
            if not (draft.probs.min() >= 0 and drawn.min() > 0 and off < 1e-3):  # nor with NaN
                raise ValueError("probs are no distributions that the tokens can be drawn from")

    def _check_tokens(self, tokens: object) -> None:
        if not isinstance(tokens, list):
            kind = type(tokens).__name__
            raise TypeError(f"proposed a {kind}, not a list of tokens: write Draft([1, 2, 3])")
        for token in tokens:
            if type(token) is not int or not 0 <= token < self._vocab_size:
                kind = type(token).__name__
                how = "" if kind == "int" else f" (a {kind}: write int(token))"
                what = f"proposed {token!r:.100}, which is no id below {self._vocab_size}"
                raise ValueError(what + how)

    def guess(self, seat: Seat, name: str, max_tokens: int) -> Guess | None:
        """What a drafter would propose if it was asked; None from those that cannot tell.

        A drafter that costs next to nothing and draws nothing may have a method
        `guess(state, max_tokens)`. It may also have a method `evidence(state)`, which tells how
        well founded the guess is, as an integer up to 8: the length of the match, for example.
        """
        drafter = self.drafters[name]
        if name not in seat.states or not hasattr(drafter, "guess"):
            return None
        try:
            self._catch_up(seat, name)
            if name not in seat.states:
                return Guess([])
            state = seat.states[name]
            tokens = self._call(name, "guess", state, max_tokens)
            if tokens is None:
                return None
            self._check_tokens(tokens)
            has_evidence = tokens and hasattr(drafter, "evidence")
            evidence = int(self._call(name, "evidence", state)) if has_evidence else 0
            return Guess(tokens, min(evidence, _MOST_EVIDENCE))
        except Exception as error:
            self._lose(seat, name, "guess", error)
            return Guess([])

    def observe(
        self, seat: Seat, verdict: Verdict, hidden: dict[int, Tensor], is_last: bool = False
    ) -> None:
        """Tell the seat's drafters what came; of the last tokens only those that keep outputs.

        The drafter that proposed is told at once, and rolls back. The others are told of all new
        text before they are asked next. `hidden` are the states [fed, D] of the verified tokens, by
        layer; of a tree, of the branch that the text took.
        """
        if seat.hidden:  # of a prompt's chunks before: together [prompt, D]
            hidden = joined([*seat.hidden.values(), hidden])
        num_rejected = verdict.drafted - verdict.accepted
        kept = hidden
        if num_rejected:  # else a view of each would cost as much as all else here
            kept = {layer: own[:-num_rejected] for layer, own in hidden.items()}
        came, seat.hidden, seat.draft = Missed(verdict.tokens, kept), {}, None
        self.remember_prompt(seat, kept)
        for name in [name for name in seat.drafts if name in seat.states]:
            if is_last and not self.drafters[name].keeps_outputs:
                continue
            try:
                draft = seat.drafts[name] if len(seat.drafts) > 1 else None
                beside = self._hidden(name, [came])
                own = verdict if beside is None else replace(verdict, hidden=beside)
                for part in heard(own, draft):
                    self._call(name, "observe", seat.states[name], part)
            except Exception as error:
                self._lose(seat, name, "observe", error)
        for name in seat.states.keys() - seat.drafts.keys():
            seat.missed.setdefault(name, []).append(came)

    def _hidden(self, name: str, cycles: list[Missed]) -> Tensor | None:
        """The states [tokens, D] that a drafter needs of these cycles, layers side by side."""
        drafter = self.drafters[name]
        if not drafter.needs_hidden:
            return None
        layers = drafter.hidden_layers
        if len(layers) == 1:
            states = [came.hidden[layers[0]] for came in cycles]
        else:
            states = [torch.cat([came.hidden[i] for i in layers], -1) for came in cycles]
        return torch.cat(states) if len(states) > 1 else states[0]

    def _catch_up(self, seat: Seat, name: str) -> None:
        """Tell a drafter what came since it was asked last, as one piece of text."""
        cycles = seat.missed.pop(name, None)
        if not cycles:
            return
        tokens = [token for cycle in cycles for token in cycle.tokens]
        try:
            verdict = Verdict(0, len(tokens) - 1, tokens, self._hidden(name, cycles))
            self._call(name, "observe", seat.states[name], verdict)
        except Exception as error:
            self._lose(seat, name, "observe", error)

    def _lose(self, seat: Seat, name: str, method: str, error: Exception) -> None:
        """The request goes on without this drafter; the log has the traceback."""
        self.failures[name] += 1
        LOG.warning("drafter %s failed: %s", name, in_short(error), exc_info=error)
        self._close(seat, name)
        what = f"drafter {name} failed ({in_short(error)}){self._where(name, method, error)}"
        rest = " and ".join(seat.states)
        seat.warnings.append(f"{what}: went on {f'with {rest}' if rest else 'without speculation'}")
        if not rest:
            seat.decision = None
        if self._is_strict:
            seat.failure = RequestError(what, status=500, code="drafter_failed")
            seat.failure.__cause__ = error

    def _where(self, name: str, method: str, error: Exception) -> str:
        """The line of somebody's own drafter that failed."""
        drafter = self.drafters[name]
        return drafter.line_of(error, method) if isinstance(drafter, TimedDrafter) else ""

    def leave(self, seat: Seat, why: str) -> None:
        """The request goes on without speculation."""
        seat.decision = seat.draft = None
        seat.warnings.append(f"{why}: went on without speculation")
        self.close(seat)

    def close(self, seat: Seat) -> None:
        """Give the drafters' states back."""
        for name in list(seat.states):
            self._close(seat, name)

    def _close(self, seat: Seat, name: str) -> None:
        if self.drafters[name].keeps_outputs:
            self._catch_up(seat, name)
        if name not in seat.states:
            return
        state = seat.states.pop(name)
        try:
            self._call(name, "close", state)
        except Exception as error:
            LOG.warning("drafter %s failed to close", name, exc_info=error)
            where = self._where(name, "close", error)
            seat.warnings.append(f"drafter {name} failed to close: {in_short(error)}{where}")


def first_choice(names: Collection[str]) -> str:
    """The drafter to begin with where nobody chooses."""
    preferred = ("mtp", "eagle3", "dflash", "self_int8", "ngram", *names)
    return next((name for name in preferred if name in names), "")
