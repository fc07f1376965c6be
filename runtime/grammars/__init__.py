"""Grammars: a text that must be JSON of a schema, match a regular expression, or follow rules.

A grammar is one more transform of logits. What it forbids gets −inf before a token is chosen:

    text so far  {"age":        the grammar allows  -  0  1 … 9
    logits       " 4.1 | 3 2.0 | 7 1.2 | …          → " −inf | 3 2.0 | 7 1.2 | …

The target's choice among the allowed tokens does not depend on a draft. So constrained text is
token for token that of plain constrained decoding. A verify of n drafted tokens needs n + 1 masks:
mask, consume the first drafted token, mask, …, and roll back. The tokens that are emitted are then
consumed for good. A draft is cut before the first token that the grammar forbids, as that would
be rejected. And what the grammar forces is a draft that costs nothing (drafters/grammar.py).

llguidance computes the masks, in some ten microseconds each: github.com/guidance-ai/llguidance.
A grammar of strangers' making may need some hundred milliseconds for one. So masks are computed in
separate threads, and a text whose masks are not there yet sits out a pass: no other text waits.

    engine's thread          explore(draft) ── settle? ── pass ── mask(logits) ── consume(tokens)
    a thread of the masks       └─ masks, a cut draft ┘ no: the next pass, perhaps
"""

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, takewhile
from math import inf
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from runtime.models.prompts import FairLock, panics_caught
from runtime.values import TOO_SLOW, Draft, RequestError

from .measure import CHOICE, JSON, REGEX, USUAL, Limits, in_characters
from .probe import BUILD_S, OF_THE_TEXT, Probe, build, reason_of

_COMPACT = {"whitespace_flexible": False}  # free whitespace leaves next to nothing forced
_MOST_COMPILED = 6  # grammars that are stored; one takes up to 42 MB
_MOST_FAILED = 64  # grammars of which is stored that they cannot be used
_MOST_WAITING = 32  # requests with a new grammar; each may take some seconds
_NUM_THREADS, _NICE = 8, 10  # for masks; passes of the target come first
_FAST_S = 0.005  # a pass waits for masks that mostly take 0.1 ms, and for no slower ones
_LONG_TOKEN = 32  # bytes
_MOST_NESTED = 60  # levels of alternatives
LOG = logging.getLogger("engine")
# For each byte of llguidance's bits eight numbers to add: 0, or −inf for what is forbidden. Looking
# them up takes a tenth of the time of unpacking bits and filling in.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_MASKS = np.where(_BITS, np.float32(0), np.float32(-inf)).view((np.void, 32)).reshape(256)
# Reasoning may stand before the text, or is under way when the text begins.
OPEN, POSSIBLE = "open", "possible"
_REASONING = (
    "start: {first} @body\nreasoning: {begin} rest\nrest: thoughts /[ \\n]{{0,4}}/\n{thoughts}"
)
_TAGS = {  # whether its tags are tokens: llguidance takes those for special ones, of no text
    False: {"begin": '"<think>"', "thoughts": 'thoughts[suffix="</think>"]: /(.|\\n)*/'},
    True: {"begin": "<think>", "thoughts": "thoughts: /(.|\\n)*/ </think>"},
}
_FIRST = {OPEN: "rest", POSSIBLE: "reasoning?"}


def source_of(kind: str, value: Any, reasoning: str = "", has_tokens: bool = False) -> str:
    """A grammar as llguidance reads it. Raises ValueError for a value that is none of its kind.

    `value` is a schema, a regular expression, a text of Lark's rules, or a list of texts. With
    `reasoning` the grammar begins behind the end of that; `has_tokens` says that its tags are
    tokens.
    """
    from llguidance import LLMatcher

    if kind == JSON:
        value = {} if value is True else value
        source = LLMatcher.grammar_from_json_schema(value, _COMPACT)
    elif kind == CHOICE:
        source = LLMatcher.grammar_from_regex(_any_of(sorted({*value})))
    elif kind == REGEX:
        source = LLMatcher.grammar_from_regex(value)
    else:
        source = LLMatcher.grammar_from_lark(value)
    if not reasoning:
        return source
    is_list = source.startswith("{")
    body = json.loads(source)["grammars"][0] if is_list else {"lark_grammar": source}
    rules = _REASONING.format(first=_FIRST[reasoning], **_TAGS[has_tokens])
    return json.dumps({"grammars": [{"lark_grammar": rules}, body | {"name": "body"}]})


def _any_of(texts: list[str], begin: int = 0, depth: int = 0) -> str:
    """A regular expression of sorted texts, behind their first `begin` characters, which are equal.

    It is a tree: thousands of alternatives side by side would be too many states at once. Below
    some levels they stand side by side all the same, as llguidance reads no deeper ones.
    Example: ["a", "abc", "abd"] -> "a(b(c|d))?".
    """
    if depth == _MOST_NESTED:
        return "|".join(re.escape(text[begin:]) for text in texts)
    end = begin + len(commonprefix([texts[0][begin:], texts[-1][begin:]]))
    head, has_whole = re.escape(texts[0][begin:end]), len(texts[0]) == end
    longer = groupby(texts[has_whole:], key=lambda text: text[end])
    if not (parts := [_any_of(list(group), end, depth + 1) for _, group in longer]):
        return head
    return f"{head}({'|'.join(parts)}){'?' * has_whole}"


class CannotGoOn(RequestError, ValueError):
    """A text has come to a place where its grammar is too large for llguidance."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the grammar cannot go on: {why}")


class Vocabulary:
    """The tokens of a model, as grammars need them. Building one takes about a second."""

    @panics_caught()
    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: frozenset[int]) -> None:
        """`size` is the number of the model's logits. Raises ValueError for a slow tokenizer."""
        from llguidance import LLTokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("needs a tokenizer of the library tokenizers, and this model has none")
        self.size = size
        words = backend.to_str(), max(size, len(tokenizer)), sorted(eos_ids)
        self._probe = Probe(str(Path(__file__).with_name("probe.py")), BUILD_S, *words)
        self._probe.start()
        self.tokenizer = LLTokenizer(*words)
        added = tokenizer.added_tokens_encoder.items()
        self.special = [text for text, i in added if self.tokenizer.is_special_token(i)]
        # By the kind of work and its text; the last one used is last.
        self._made: dict[tuple[str, str], Any] = {}
        self._failed: dict[tuple[str, str], tuple[bool, str]] = {}  # is it our fault, and why
        self._lock, places = threading.Lock(), threading.BoundedSemaphore(_MOST_WAITING)
        self._building = FairLock("new grammars", 0, 0, places)

    def in_lark(self, rules: str) -> str:
        """GBNF as rules of Lark's. Raises as `compiled` does."""
        codes = in_characters(rules, is_source=True)  # llguidance drops a code's first zeros
        return self._once("rules", rules, lambda: self._probe.in_lark(codes))

    def compiled(self, source: str, limits: Limits = USUAL) -> "Grammar":
        """The grammar of this source. New ones are compiled one at a time.

        `limits` are those of measure.py. Raises ValueError for one that cannot be used,
        RequestError 429 where too many wait, 503 where the machine is too slow for it.
        """

        def build() -> Grammar:
            self._probe.check(source, *limits)
            return Grammar(source, limits, self)

        return self._once("grammar", source, build)

    def _once(self, what: str, text: str, make: Callable[[], Any]) -> Any:
        """What `make` makes of a text; what it raises is raised again for that text."""
        if (made := self._known(what, text)) is None:
            with self._building.take(1):
                if (made := self._known(what, text)) is None:  # else others had asked for the same
                    made = self._make(what, text, make)
        return made

    def _make(self, what: str, text: str, make: Callable[[], Any]) -> Any:
        stored, most, made = self._failed, _MOST_FAILED, None
        try:
            made = make()
            stored, most, value = self._made, _MOST_COMPILED, made
        except TimeoutError:
            LOG.error("a grammar took longer than %g s to build: %.500r", BUILD_S, text)
            value = True, "the grammar took too long to build on this machine"
        except ValueError as error:
            value = False, str(error)
        with self._lock:
            stored[what, text] = value
            for oldest in [*stored][:-most]:
                del stored[oldest]
        return made or self._known(what, text)

    def _known(self, what: str, text: str) -> Any:
        """What was made of a text; None if it is new. Raises what making it raised."""
        with self._lock:
            is_ours, why = self._failed.get((what, text), (False, ""))
            if is_ours:
                raise RequestError(why, status=503, code=TOO_SLOW)
            if why:
                raise ValueError(why)
            if made := self._made.pop((what, text), None):
                self._made[what, text] = made
            return made


_vocabulary_of, _building = lru_cache(2)(Vocabulary), threading.Lock()


def vocabulary_of(tokenizer: Tokenizer, size: int, eos_ids: frozenset[int]) -> Vocabulary:
    """The tokens of a model, built once: first requests may come at the same time."""
    with _building:
        return _vocabulary_of(tokenizer, size, eos_ids)


class Grammar:
    """A grammar that is ready for any number of requests."""

    def __init__(self, source: str, limits: Limits, vocabulary: Vocabulary) -> None:
        """Raises ValueError for a grammar that llguidance refuses."""
        self.source, self.vocabulary, self._limits = source, vocabulary, limits
        self.build()
        self._first.compute_bitmask()  # the first mask takes longest
        if why := reason_of(self._first):
            raise ValueError(why)
        self.under_way: list[Future[Any]] = []  # masks of its texts that are being computed
        self.is_slow = False  # they took longer than a pass waits
        self.is_heavy = False  # a mask was too much: its texts draft nothing more

    def build(self) -> None:
        """Begin anew: copies of one matcher together may build so many states and no more."""
        self._first = build(self.vocabulary.tokenizer, self.source, *self._limits)

    def copy(self) -> Any:
        """A matcher of llguidance's for a new text."""
        return self._first.deep_copy()

    def matcher(self) -> "Matcher":
        """A matcher for a new text."""
        return Matcher(self)


def _lower_priority() -> None:
    if sys.platform == "linux":  # elsewhere the number may be that of another process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


_threads = ThreadPoolExecutor(_NUM_THREADS, "masks", _lower_priority)


class Matcher:
    """Where a text stands in its grammar: which tokens may come next, and which must.

    Call `cut` or `mask` only when the text is settled, as they wait for its masks.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar, self._matcher, self._vocabulary = grammar, grammar.copy(), grammar.vocabulary
        self._tokens: list[int] = []  # of the text
        self._lost: CannotGoOn | None = None  # why the matcher has not followed the text
        self.has_ended = False  # the text is whole, which `consume` could not tell
        # The draft that is explored: which of its tokens may come, and all masks.
        self._draft: Draft | None = None
        self._explored: Future[tuple[set[int], np.ndarray]] = Future()

    def explore(self, draft: Draft) -> None:
        """Begin to compute the masks behind the pending token and each drafted one."""
        if draft is not self._draft:
            self._draft, self._explored = draft, _threads.submit(self._explore, draft)
            self._grammar.under_way.append(self._explored)

    def settle(self, began: float) -> bool:
        """Whether the masks of all texts of this grammar are computed.

        Matchers of one grammar share its states, so `consume` would wait for another's mask. Waits
        until _FAST_S after `began`, but not where the grammar was slow before.
        """
        under_way = self._grammar.under_way
        if not self._grammar.is_slow:
            wait(under_way, max(0.0, began + _FAST_S - time.monotonic()))
        under_way[:] = [masks for masks in under_way if not masks.done()]
        self._grammar.is_slow |= bool(under_way)
        return not under_way

    def cut(self, draft: Draft, is_drawn: bool = False) -> Draft:
        """The draft without tokens that the grammar forbids, and without what follows them.

        `is_drawn`: it is judged by rejection and was drawn from q. To drop a token because of what
        was drawn would change the distribution, so the first forbidden one stays, to be rejected.
        """
        self.explore(draft)
        try:
            kept, masks = self._explored.result()
        except ValueError:  # `mask` will raise it
            self._draft = Draft()
            return self._draft
        paths = draft.paths()
        if is_drawn:
            kept = kept | {i for i, path in enumerate(paths) if kept.issuperset(path[:-1])}
        places = sorted(kept)
        if len(places) < len(paths):
            self._draft, self._explored = _part(draft, places), Future()
            masks = masks[[0, *(i + 1 for i in places)]]
            self._explored.set_result(({*range(len(places))}, masks))
        return self._draft

    def mask(self, scores: Tensor, draft: Draft) -> Tensor:
        """Scores [n + 1, V] with −inf for what is forbidden after the pending and drafted tokens.

        Rows behind a forbidden token stay as they are; behind what was not explored all is −inf.
        Raises ValueError where the grammar cannot go on: a mask or a state may be too large.
        """
        self.explore(draft)
        _, masks = self._explored.result()
        return scores + torch.from_numpy(masks).to(scores.device)

    @panics_caught()
    def _explore(self, draft: Draft) -> tuple[set[int], np.ndarray]:
        """The drafted tokens that the text may go on with, and the masks [n + 1, V] to be added.

        Raises ValueError where the grammar cannot go on behind the pending token.
        """
        kept, shape = set[int](), (len(draft.tokens) + 1, self._vocabulary.size)
        masks, began = np.zeros(shape, np.float32), time.monotonic()
        try:
            if self._lost:
                raise self._lost
            self._walk(self._matcher.deep_copy(), draft, -1, kept, masks)
        except CannotGoOn as error:  # others may have used up what llguidance allows
            self._grammar.is_heavy, self._lost = True, None
            self._begin_anew(self._tokens, error)
            self.has_ended = self._matcher.is_stopped() and not self._matcher.is_error()
            self._walk(self._matcher.deep_copy(), draft, -1, kept, masks)
        finally:
            self._grammar.is_slow = time.monotonic() - began > _FAST_S
        return kept, masks

    def _walk(
        self, matcher: Any, draft: Draft, node: int, kept: set[int], masks: np.ndarray
    ) -> None:
        """Explore a drafted token and all behind it; -1 is the pending token.

        `matcher` is a copy that stands there: an error of llguidance's matcher stays.
        """
        self._check(matcher)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        self._check(matcher)
        row = masks[node + 1]
        row[:] = _MASKS.take(bits).view(np.float32)[: len(row)]
        for child in draft.children(node):
            if row[draft.tokens[child]]:  # −inf is true
                continue
            masks[child + 1] = -inf  # as long as it is not explored: the text may come there
            if self._grammar.is_heavy:
                continue
            ahead = matcher.deep_copy()
            ahead.consume_token(draft.tokens[child])
            try:
                self._walk(ahead, draft, child, kept, masks)
            except CannotGoOn:  # the text may never come there
                masks[child + 1] = -inf
                self._grammar.is_heavy = True
            else:
                kept.add(child)

    def _begin_anew(self, tokens: list[int], error: CannotGoOn) -> None:
        """Begin again with these tokens. Raises the error if they alone are to blame for it."""
        if any(why in error.message for why in OF_THE_TEXT):
            raise error
        self._grammar.build()
        self._matcher = self._grammar.copy()
        self._matcher.consume_tokens(tokens)

    @panics_caught()
    def consume(self, token: int) -> bool:
        """Go on with a token of the text. Returns whether the text is whole: nothing may follow.

        Where that is too much, a thread of the masks begins anew, and all wait for no text. If that
        fails, too, or the token was forbidden, `mask` raises.
        """
        self._draft = None
        self._tokens.append(token)
        if not self._lost:
            self._matcher.consume_token(token)
            if self._matcher.is_error():
                self._lost = CannotGoOn(reason_of(self._matcher))
        return not self._lost and self._matcher.is_stopped()

    @panics_caught()
    def forced(self, most: int) -> list[int]:
        """At most `most` tokens of the text that must follow, as the tokenizer would write it.

        Mostly its tokens are forced, too. The last one may still grow by what follows.
        """
        if self._lost:
            return []
        text = self._matcher.compute_ff_bytes()[: _LONG_TOKEN * most]
        ids = self._vocabulary.tokenizer.tokenize_bytes(text)[:most] if text else []
        return [*takewhile(self._vocabulary.size.__gt__, ids)]  # the model may have fewer

    @property
    def may_end(self) -> bool:
        """Whether the text is a whole one of the grammar."""
        return self._matcher.is_accepting()

    def _check(self, matcher: Any) -> None:
        if why := reason_of(matcher):
            raise CannotGoOn(why)


def _part(draft: Draft, places: list[int]) -> Draft:
    """The drafted tokens at these rising indexes, each with all of its path among them."""
    part = draft.chain(places)
    if draft.parents is None:
        return part
    index = {-1: -1} | {old: new for new, old in enumerate(places)}
    return replace(part, parents=[index[draft.parents[i]] for i in places])
