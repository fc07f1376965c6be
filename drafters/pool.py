"""The pool asks a server's drafters, checks their drafts, and contains their faults.

A drafter may be wrong or broken in any way: it raises, hangs, or proposes ids that do not exist.
After such a fault its request goes on without that drafter, and the answer stays the same. (With
--strict the request fails.) The request's other drafters go on.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.cache.prefix import PrefixCache
from runtime.sampling import Noise
from runtime.values import (
    Draft,
    Request,
    RequestError,
    StopRule,
    TextSequence,
    Verdict,
    in_short,
)

from .base import Drafter, restoring_settings
from .timed import TimedDrafter
from .tree import longest, merged, split_verdict

AUTO = "auto"  # a request's name for all drafters
TREE = "tree"  # for several at once, whose drafts are merged into one tree
_MOST_EVIDENCE, _MOST_FORCED = 8, 16
_AGAIN_S = 0.001  # until it is looked again where all texts wait for their grammars
LOG = logging.getLogger("drafters")


class Task(NamedTuple):
    """What a request is to have drafted in a cycle."""

    drafter: str = ""  # a name, TREE for several at once, or empty for none
    limit: int = 0  # tokens, at most
    stop_rule: StopRule | None = None  # when a draft stops early; None: never
    decision: Any = None  # of the controller, with its reasons: to be shown


class Guess(NamedTuple):
    """What a drafter would have proposed, if it had been asked."""

    tokens: list[int]
    evidence: int = 0  # proposals of one number share a record


class UnseenCycle(NamedTuple):
    """What came in a cycle. A drafter without a part in it observes it before it is asked next."""

    tokens: list[int]
    hidden: dict[int, Tensor]  # [tokens, D] by layer


@dataclass(eq=False)
class DraftedText:
    """The text of one request, as the pool knows it: drafters' states, and what they drafted."""

    request: Request
    noise: Noise
    row: int = -1  # in the target's KV cache
    matcher: Any = None  # where the text stands in its grammar; None: it has none
    forced: list[int] | None = None  # tokens that the grammar forces here; None: not asked yet
    states: dict[str, Any] = field(default_factory=dict)  # by drafter, without those that failed
    task: Task = Task()  # of this cycle
    drafts: dict[str, Draft] = field(default_factory=dict)  # of this cycle, by drafter
    draft: Draft | None = None  # what was proposed and is not judged yet
    unseen: dict[str, list[UnseenCycle]] = field(default_factory=dict)  # by drafter not asked
    warnings: list[str] = field(default_factory=list)
    failure: Exception | None = None  # a drafter's fault that is to end the request
    num_cached: int = 0  # tokens of the prompt that came from the prefix cache
    accepted: Counter[str] = field(default_factory=Counter)  # tokens, by drafter that `needs` a
    rejected: Counter[str] = field(default_factory=Counter)  # field, and those verified in vain
    # Of chunks of a prompt that are read, by the position of their first token.
    hidden: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    # Of the text since its beginning, one after the other: states [tokens, D] by layer.
    states_read: list[dict[int, Tensor]] = field(default_factory=list)


class DrafterPool:
    """The drafters of a server."""

    def __init__(
        self, drafters: dict[str, Drafter], vocab_size: int, default: str | None = None,
        is_strict: bool = False, prefixes: PrefixCache | None = None, can_branch: bool = False,
    ) -> None:  # fmt: skip
        """`is_strict` lets a drafter's fault fail the request: for those who write a drafter.

        `prefixes` are the target's: what it knows of a prompt, the drafters read along.
        `can_branch` says that the target can verify a tree. Raises ValueError if the default needs
        that.
        """
        self.drafters, self._vocab_size, self.is_strict = drafters, vocab_size, is_strict
        self.prefixes, self.can_branch = prefixes, can_branch
        # What a request may ask for, and the drafters that this means: of several, the one to
        # begin with stands first.
        first = first_choice(drafters, default)
        every = dict.fromkeys([first, *drafters] if drafters else ())
        self.choices = {name: (name,) for name in drafters} | {AUTO: tuple(every)}
        self.special = {name for name, drafter in drafters.items() if drafter.needs}
        free = [name for name, drafter in drafters.items() if hasattr(drafter, "guess")]
        models = [name for name in drafters if name not in free]
        if can_branch and len(drafters) > 1:
            model = first_choice(models, default)
            self.choices[TREE] = (model, *free) if model else tuple(free)
        elif default == TREE:
            raise ValueError(
                "--drafter tree needs two drafters, and forwards in C of a model without recurrent "
                "layers"
            )
        self.failures: Counter[str] = Counter()  # of each drafter
        self.log = LOG  # of these failures
        self.num_late = 0  # times that a text sat out a pass, as its grammar was slow
        # Of the last `propose`, by drafter or TREE: steps of each request (mostly tokens), and ms.
        self.spent: dict[str, tuple[list[int], float]] = {}

    def _call(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a drafter's method. Ours leave torch's settings alone, and are called often."""
        call = getattr(self.drafters[name], method)
        is_trusted = self.drafters[name].is_trusted
        return (call if is_trusted else restoring_settings()(call))(*arguments)

    def _seen(self, name: str, method: str, see: Callable[[Any], Any], *arguments: Any) -> Any:
        """What `see` makes of what a drafter's method returns: in its thread, if it has one."""
        if isinstance(drafter := self.drafters[name], TimedDrafter):
            return drafter.call(method, *arguments, then=see)
        return see(self._call(name, method, *arguments))

    def open(self, text: DraftedText) -> None:
        """Let the drafters that a new request names read along."""
        request, failed = text.request, dict[str, Exception]()
        for name in self.eligible(request):
            try:
                # Copies, as a prompt may be the state, which grows, and the target needs its noise.
                prompt, noise = list(request.prompt), copy(text.noise)
                state = self._call(name, "open", prompt, request.drafting, noise)
                text.states[name] = state
                self.drafters[name].attach(state, text.row, request.prediction, text.matcher)
            except Exception as error:
                failed[name] = error
        for name, error in failed.items():
            self.drop_drafter(text, name, "open", error)
        is_scored = request.prompt_logprobs is not None  # then all of the prompt has to be read
        if self.prefixes and not (request.isolated or is_scored):
            hidden = self.prefixes.restore(text.row, request.prompt, self.layers([text]))
            text.num_cached = self.prefixes.length(text.row)
            # Of no layers, too: what is read next does not begin at the text's first token.
            text.hidden = {0: hidden} if text.num_cached else {}

    def eligible(self, request: Request) -> list[str]:
        """The drafters that read along with a request; that of its prediction is the first."""
        names = self.choices[request.drafter] if request.drafter else ()
        needs = {name: self.drafters[name].needs for name in names}
        able = [name for name, field in needs.items() if not field or getattr(request, field)]
        return sorted(able, key=lambda name: needs[name] != "prediction")

    def remember_prompt(self, text: DraftedText, states: dict[int, Tensor]) -> None:
        """Remember a prompt, once it has been read, and note the states [tokens, D] by layer."""
        if self.prefixes and not text.request.isolated:
            if not text.states_read:
                self.prefixes.remember(text.row, text.request.prompt, states)
            text.states_read.append(states)

    def remember(self, text: DraftedText, tokens: list[int]) -> None:
        """Keep a whole text, before its row is closed: it may come back as a prompt's beginning.

        A token has the same keys and values read or written where bits are equal, and only there.
        """
        if text.hidden:  # of a prompt behind which nothing was generated
            self.remember_prompt(text, joined(list(text.hidden.values())))
        if text.states_read:
            self.prefixes.remember(text.row, tokens, joined(text.states_read))

    def layers(self, texts: list[DraftedText]) -> tuple[int, ...]:
        """The layers whose hidden states the drafters of these texts want."""
        present = {name for text in texts for name in text.states}
        wanted = [d.hidden_layers for name in present if (d := self.drafters[name]).needs_hidden]
        return tuple(sorted({layer for layers in wanted for layer in layers}))

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
            asked = [text for text in waiting if name in text.drafts]
            for text in asked:
                self._catch_up(text, name)
            group = [t for t in asked if name in t.states and self._begin_with_forced(t, name)]
            if not group:
                continue
            for text in group if self.drafters[name].branches else ():
                text.states[name].can_branch = len(text.drafts) > 1
            began = time.perf_counter()
            drafts = self._ask(name, group)
            ms = (time.perf_counter() - began) * 1e3
            for text, draft in zip(group, drafts, strict=True):
                text.drafts[name] = draft
            self._note(name, group, ms)
        for text in waiting:
            if text.drafts:
                draft = merged(list(text.drafts.values()), text.task.limit)
                text.draft = self._obeying(text, draft)
        return [text.draft for text in texts]

    def _obeying(self, text: DraftedText, draft: Draft) -> Draft:
        """A draft in which stands first what the text's grammar forces."""
        if not text.matcher:
            return draft
        forced = self._forced(text)[: text.task.limit]
        if draft.parents is None and draft.tokens[: len(forced)] != forced:
            return Draft(forced)
        return draft

    def settled(self, sequences: list[TextSequence]) -> list[TextSequence]:
        """Those whose drafts can be verified: their grammars have said what may come.

        A grammar may be slow: its text sits out a pass, and the others do not wait for it.
        """
        constrained = [s.drafting for s in sequences if s.drafting.matcher]
        for text in constrained:
            if text.draft is not None:
                text.matcher.explore(text.draft)
        began = time.monotonic()
        late = [text for text in constrained if not text.matcher.settle(began)]
        for text in constrained:
            if text not in late and (draft := text.draft) is not None:
                is_drawn = draft.probs is not None and not text.request.sampling.is_coupled
                text.draft = text.matcher.cut(draft, is_drawn)
        if ready := [s for s in sequences if s.drafting not in late]:
            self.num_late += len(late)
        elif late:
            time.sleep(_AGAIN_S)
        return ready

    def _forced(self, text: DraftedText) -> list[int]:
        """What the grammar forces next, where several drafters draft for a text, and none draws."""
        request = text.request
        if not text.matcher or len(text.states) < 2 or request.drafting.needs_q:
            return []
        if text.forced is None:
            text.forced = text.matcher.forced(_MOST_FORCED)
        return text.forced

    def _begin_with_forced(self, text: DraftedText, name: str) -> bool:
        """Let a drafter begin with what is forced. Returns whether it is to be asked at all.

        A head drafts behind the target's states, which it has of no drafted token.
        """
        forced, drafter = self._put_first(text, name, text.task.limit), self.drafters[name]
        can = drafter.accepts_forced_prefix or drafter.needs == "grammar"
        return can or not forced or len(text.drafts) > 1

    def _put_first(self, text: DraftedText, name: str, most: int) -> list[int]:
        """Return what is forced, and give it to a drafter that can go on behind it."""
        forced = self._forced(text)[:most]
        if self.drafters[name].accepts_forced_prefix:
            text.states[name].forced = forced
        return forced

    def can_grow(self, text: DraftedText) -> bool:
        """Whether the text's drafts may branch."""
        return self.can_branch and text.request.sampling.is_coupled

    def members(self, text: DraftedText, name: str) -> list[str]:
        """The text's drafters that draft where `name` is asked: one, or all for a tree."""
        if name != TREE:
            return [name] if name else []
        names = [member for member in self.choices.get(TREE, ()) if member in text.states]
        return names if names and self.can_grow(text) else list(text.states)[:1]

    def _note(self, name: str, texts: list[DraftedText], ms: float) -> None:
        """Note the cost of a call of a drafter, under TREE if all its drafts are for trees."""
        if all(text.task.drafter == TREE for text in texts):
            counts, before_ms = self.spent.get(TREE, ([text.task.limit for text in texts], 0.0))
            self.spent[TREE] = counts, before_ms + ms
        else:  # tokens drafted, or asked for where none came
            counts = [len(text.drafts[name].tokens) or text.task.limit for text in texts]
            self.spent[name] = counts, ms

    def _ask(self, name: str, texts: list[DraftedText]) -> list[Draft]:
        """Drafts that can be verified; an empty one for a text that loses its drafter."""
        try:
            states = [text.states[name] for text in texts]
            if self.drafters[name].stops_early:
                for state, text in zip(states, texts, strict=True):
                    state.stop_rule = text.task.stop_rule
            limits = [text.task.limit for text in texts]
            see = partial(self._copies, texts)
            return self._seen(name, "propose_batch", see, states, limits)
        except Exception as error:
            if len(texts) > 1:  # one of them is to blame, and the others need not suffer for it
                return [self._ask(name, [text])[0] for text in texts]
            self.drop_drafter(texts[0], name, "propose_batch", error)
            return [Draft()]

    def _copies(self, texts: list[DraftedText], proposed: Any) -> list[Draft]:
        """Copies of drafts. Raises TypeError or ValueError for those that cannot be verified."""
        if not isinstance(proposed, list) or len(proposed) != len(texts):
            raise ValueError("propose_batch has to return a list of one Draft for each state")
        copies = list[Draft]()
        for text, draft in zip(texts, proposed, strict=True):
            draft = copied(draft, text.request, text.task.limit, self._vocab_size)
            copies.append(draft if self.can_grow(text) else longest(draft))
        return copies

    def guess(self, text: DraftedText, name: str, max_tokens: int) -> Guess | None:
        """What a drafter would propose if it was asked; None from those that cannot tell.

        A drafter that costs next to nothing and draws nothing may have a method
        `guess(state, max_tokens)`. It may also have a method `evidence(state)`, which says how well
        founded the guess is, as an integer up to 8: the length of the match, for example.
        """
        drafter = self.drafters[name]
        if name not in text.states or not hasattr(drafter, "guess"):
            return None
        try:
            self._catch_up(text, name)
            if name not in text.states:
                return Guess([])
            state, forced = text.states[name], self._put_first(text, name, max_tokens)
            see = partial(ids_of, most=max_tokens, vocab_size=self._vocab_size)
            if (tokens := self._seen(name, "guess", see, state, max_tokens)) is None:
                return None
            has_evidence = tokens and hasattr(drafter, "evidence")
            evidence = self._seen(name, "evidence", int, state) if has_evidence else 0
            evidence = _MOST_EVIDENCE if forced and drafter.accepts_forced_prefix else evidence
            return Guess(tokens, max(0, min(evidence, _MOST_EVIDENCE)))
        except Exception as error:
            self.drop_drafter(text, name, "guess", error)
            return Guess([])

    def observe(
        self, text: DraftedText, verdict: Verdict, hidden: dict[int, Tensor], is_last: bool = False
    ) -> None:
        """Hand the text's drafters the verdict; the last one only to those that keep outputs.

        The drafter that proposed observes it at once, and rolls back. The others observe all new
        text before they are asked next. `hidden` are the states [fed, D] of the verified tokens, by
        layer; of a tree, of the path that the text took.
        """
        if text.hidden:  # of a prompt's chunks before: together [prompt, D]
            hidden = joined([*text.hidden.values(), hidden])
        num_rejected = verdict.drafted - verdict.accepted
        if num_rejected:  # else a view of each would cost as much as all else here
            hidden = {layer: states[:-num_rejected] for layer, states in hidden.items()}
        came, judged = UnseenCycle(verdict.tokens, hidden), text.draft
        text.hidden, text.draft, text.forced = {}, None, None
        self.remember_prompt(text, hidden)
        for name in [name for name in text.drafts if name in text.states]:
            if self.drafters[name].needs:
                chain = text.drafts[name].tokens
                num_verified, num_kept = count_verified(chain, judged, verdict.tokens)
                text.accepted[name] += num_kept
                text.rejected[name] += num_verified - num_kept
            if is_last and not self.drafters[name].keeps_outputs:
                continue
            try:
                draft = None if text.drafts[name] is judged else text.drafts[name]
                states = self._hidden(name, [came])
                whole = verdict if states is None else replace(verdict, hidden=states)
                for part in split_verdict(whole, draft):
                    self._call(name, "observe", text.states[name], part)
            except Exception as error:
                self.drop_drafter(text, name, "observe", error)
        for name in text.states.keys() - text.drafts.keys():
            text.unseen.setdefault(name, []).append(came)

    def _hidden(self, name: str, cycles: list[UnseenCycle]) -> Tensor | None:
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

    def _catch_up(self, text: DraftedText, name: str) -> None:
        """Let a drafter observe what came since it was asked last, as one piece of text."""
        if not (cycles := text.unseen.pop(name, None)):
            return
        tokens = [token for cycle in cycles for token in cycle.tokens]
        try:
            verdict = Verdict(0, len(tokens) - 1, tokens, self._hidden(name, cycles))
            self._call(name, "observe", text.states[name], verdict)
        except Exception as error:
            self.drop_drafter(text, name, "observe", error)

    def drop_drafter(self, text: DraftedText, name: str, method: str, error: Exception) -> None:
        """The request goes on without this drafter; the log has the traceback."""
        self.failures[name] += 1
        self.log.warning("drafter %s failed: %s", name, in_short(error), exc_info=error)
        self._close(text, name)
        what = f"drafter {name} failed ({in_short(error)}){self._where(name, method, error)}"
        rest = " and ".join(text.states)
        text.warnings.append(f"{what}: went on {f'with {rest}' if rest else 'without speculation'}")
        if not rest:
            text.task = text.task._replace(decision=None)
        if self.is_strict:
            text.failure = RequestError(what, status=500, code="drafter_failed")
            text.failure.__cause__ = error

    def _where(self, name: str, method: str, error: Exception) -> str:
        """The line of a drafter from a file that failed."""
        drafter = self.drafters[name]
        return drafter.line_of(error, method) if isinstance(drafter, TimedDrafter) else ""

    def drop_all_drafters(self, text: DraftedText, why: str) -> None:
        """The request goes on without speculation."""
        text.task, text.draft = Task(), None
        text.warnings.append(f"{why}: went on without speculation")
        self.close(text)

    def close(self, text: DraftedText) -> None:
        """Give the drafters' states back."""
        for name in list(text.states):
            self._close(text, name)

    def _close(self, text: DraftedText, name: str) -> None:
        if self.drafters[name].keeps_outputs:
            self._catch_up(text, name)
        if name not in text.states:
            return
        state = text.states.pop(name)
        try:
            self._call(name, "close", state)
        except Exception as error:
            self.log.warning("drafter %s failed to close", name, exc_info=error)
            where = self._where(name, "close", error)
            text.warnings.append(f"drafter {name} failed to close: {in_short(error)}{where}")


def copied(draft: Any, request: Request, limit: int, vocab_size: int) -> Draft:
    """A copy, of plain values, of a draft that can be verified: its drafter cannot change it.

    Raises TypeError or ValueError, saying what is wrong, for another one. Where `probs` are only
    shown, those that are no distributions are left out.
    """
    if not isinstance(draft, Draft):
        raise TypeError(f"propose returned a {type(draft).__name__}: write return Draft(tokens)")
    tokens = ids_of(draft.tokens, limit + 1, vocab_size)
    if (count := len(tokens)) > limit:
        raise ValueError(f"more tokens proposed than the {limit} asked for")
    confidence, parents, probs = draft.confidence, draft.parents, draft.probs  # read once
    if confidence is not None:
        fits = isinstance(confidence, (list, tuple))
        confidence = [*map(float, islice(confidence, count + 1))] if fits else confidence
        if not (fits and len(confidence) in (0, count) and all(0 <= c <= 1 for c in confidence)):
            raise ValueError("confidence is not a list of one number from 0 to 1 for each token")
    if parents is not None:
        places = [*islice(parents, count + 1)] if isinstance(parents, list) else []
        is_tree = all(type(place) is int and -1 <= place < i for i, place in enumerate(places))
        if not is_tree or len(places) != count:
            raise ValueError(f"parents {parents!r:.100} for {count} tokens")
        parents = places
    q, is_judged = None, not request.sampling.is_coupled
    if is_judged and parents is not None and probs is not None:
        raise ValueError("drawn tokens that branch cannot be judged by rejection")
    if probs is not None and count and (is_judged or request.trace):
        with nullcontext() if is_judged else suppress(ValueError):
            q = q_of(probs, tokens, vocab_size)
    return Draft(tokens, q, parents, confidence or [], int(draft.num_forwards or 0))


def q_of(probs: Any, tokens: list[int], vocab_size: int) -> Tensor:
    """A copy [n, V] float32 of what tokens were drawn from. Raises ValueError if it cannot be."""
    if not isinstance(probs, Tensor):
        raise ValueError(f"probs are a {type(probs).__name__}: write a torch.Tensor, or None")
    with torch.no_grad(), torch._C.DisableTorchFunction():  # a subclass may do anything in each
        if probs.layout != torch.strided or probs.is_meta or not probs.is_floating_point():
            kind = f"{probs.dtype}, {probs.layout}, on {probs.device}"
            raise ValueError(f"probs are a tensor of {kind}: write a dense one of floating point")
        if probs.shape != (len(tokens), vocab_size):
            raise ValueError(f"probs of shape {[*probs.shape]} for {len(tokens)} tokens")
        q = torch.empty(probs.shape, dtype=torch.float32, device=probs.device).copy_(probs)
        drawn, off = q[range(len(tokens)), tokens], (q.sum(-1) - 1).abs().max()
        if not (q.min() >= 0 and drawn.min() > 0 and off < 1e-3):  # nor with NaN
            raise ValueError("probs are no distributions that the tokens can be drawn from")
    return q


def ids_of(tokens: Any, most: int, vocab_size: int) -> list[int] | None:
    """The first `most` of these tokens, in a list of its own; of None, None.

    Raises TypeError or ValueError unless they are a list of ids below `vocab_size`.
    """
    if tokens is None:
        return None
    if not isinstance(tokens, list):
        kind = type(tokens).__name__
        raise TypeError(f"proposed a {kind}, not a list of tokens: write Draft([1, 2, 3])")
    ids = [*islice(tokens, most)]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            kind = type(token).__name__
            how = "" if kind == "int" else f" (a {kind}: write int(token))"
            what = f"proposed {token!r:.100}, which is no id below {vocab_size}"
            raise ValueError(what + how)
    return ids


def count_verified(chain: list[int], verified: Draft, came: list[int]) -> tuple[int, int]:
    """How many tokens of a drafter's chain were verified, and how many of them the text got.

    Those behind an end of text count as not verified. `came` are the tokens that the text got.

    Example: 5 6 7 in a tree that has 5 6 and 5 8; the text got 5 8 9 -> 2, 1.
    """
    at, num_verified, num_kept = -1, 0, 0
    for token in chain:
        below = [i for i in verified.children(at) if verified.tokens[i] == token]
        if not below or num_kept == len(came):
            break
        at, num_verified = below[0], num_verified + 1
        num_kept += came[num_kept] == token and num_kept == num_verified - 1
    return num_verified, num_kept


def joined(parts: list[dict[int, Tensor]]) -> dict[int, Tensor]:
    """States [tokens, D] by layer, of the layers that all parts have."""
    first, *others = parts
    layers = [layer for layer in first if all(layer in part for part in others)]
    return {layer: torch.cat([part[layer] for part in parts]) for layer in layers}


def first_choice(names: Collection[str], wanted: str | None = None) -> str:
    """The drafter to begin with: the wanted one, if it is one of these; "" if there is none."""
    preferred = (wanted, "mtp", "eagle3", "dflash", "self_int8", "ngram", *names)
    return next((name for name in preferred if name in names), "")
