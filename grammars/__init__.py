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
"""

import json
import re
import threading
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from math import inf
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from messages import Draft, RequestError
from models.prompts import Turns

from .probe import TOO_WIDE, Probe, build, reason_of

JSON, REGEX, LARK, CHOICE = "json", "regex", "lark", "choice"  # kinds of grammars
_COMPACT = {"whitespace_flexible": False}  # free whitespace leaves next to nothing forced
_MOST_COMPILED = 16  # grammars that are stored; one may take 100 MB
_MOST_WAITING = 32  # requests with a new grammar; each may take .2 s
_MOST_RESTARTS = 8  # of a text's matcher at one place
_LONG_TOKEN = 32  # bytes
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


# llguidance asks the same in a way that takes seconds for thousands of empty lines.
_OF_LARK = re.compile(r"(?m)^[^\S\n]*(?:%llguidance\b|start\s*:)")


def is_gbnf(rules: str) -> bool:
    """Whether rules are GBNF (llama.cpp's form), and not Lark's."""
    return not _OF_LARK.search(rules)


_DIGIT = "[0-9a-fA-F]"
_CODE = re.compile(rf"\\\\|\\x({_DIGIT}{{2}})|\\u({_DIGIT}{{4}})|\\U({_DIGIT}{{8}})")


def in_characters(rules: str, is_source: bool = False) -> str:
    """GBNF with characters in the place of their codes. Raises ValueError for a code of none.

    In a source ASCII stays in codes, as some of it has a meaning there.
    """

    def character(code: re.Match[str]) -> str:
        if code[0] == "\\\\":
            return code[0]
        number = int(code[1] or code[2] or code[3], 16)
        if not 0 < number < 0x110000 or 0xD800 <= number < 0xE000:
            raise ValueError(f"{code[0]} is no character")
        return f"\\x{number:02x}" if is_source and number < 128 else chr(number)

    return _CODE.sub(character, rules)


def _any_of(texts: list[str], begin: int = 0) -> str:
    """A regular expression of sorted texts, behind their first `begin` characters, which are equal.

    It is a tree: thousands of alternatives side by side would be too many states at once.
    Example: ["a", "abc", "abd"] -> "a(b(c|d))?".
    """
    end = begin + len(commonprefix([texts[0][begin:], texts[-1][begin:]]))
    head, has_whole = re.escape(texts[0][begin:end]), len(texts[0]) == end
    longer = groupby(texts[has_whole:], key=lambda text: text[end])
    if not (parts := [_any_of(list(group), end) for _, group in longer]):
        return head
    return f"{head}({'|'.join(parts)}){'?' * has_whole}"


class CannotGoOn(RequestError, ValueError):
    """A text has come to a place where its grammar is too large for llguidance."""


class Vocabulary:
    """The tokens of a model, as grammars need them. Building one takes about a second."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: frozenset[int]) -> None:
        """`size` is the number of the model's logits. Raises ValueError for a slow tokenizer."""
        from llguidance import LLTokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("needs a tokenizer of the library tokenizers, and this model has none")
        self.size = size
        words = backend.to_str(), max(size, len(tokenizer)), sorted(eos_ids)
        self._probe = Probe(str(Path(__file__).with_name("probe.py")), *words)
        self._probe.start()
        self.tokenizer = LLTokenizer(*words)
        added = tokenizer.added_tokens_encoder.items()
        self.special = [text for text, i in added if self.tokenizer.is_special_token(i)]
        self._compiled: dict[str, Grammar] = {}  # by source, the last one used last
        self._lock, places = threading.Lock(), threading.BoundedSemaphore(_MOST_WAITING)
        self._turns = Turns("new grammars", 0, 0, places)
        self.in_lark = lru_cache(_MOST_COMPILED)(self._in_lark)

    def _in_lark(self, rules: str) -> str:
        """GBNF as rules of Lark's. Raises as `compiled` does."""
        with self._turns.take(1):  # llguidance drops a code's first zeros
            return self._probe.in_lark(in_characters(rules, is_source=True))

    def compiled(self, source: str) -> "Grammar":
        """The grammar of this source. New ones are compiled one at a time.

        Raises ValueError for one that cannot be used, RequestError 429 where too many wait.
        """
        if grammar := self._known(source):
            return grammar
        with self._turns.take(1):
            if grammar := self._known(source):  # others had asked for the same
                return grammar
            self._probe.check(source)
            self._compiled[source] = grammar = Grammar(source, self)
            with self._lock:
                for oldest in [*self._compiled][:-_MOST_COMPILED]:
                    del self._compiled[oldest]
            return grammar

    def _known(self, source: str) -> "Grammar | None":
        with self._lock:
            if grammar := self._compiled.pop(source, None):
                self._compiled[source] = grammar
            return grammar


_vocabulary_of, _building = lru_cache(2)(Vocabulary), threading.Lock()


def vocabulary_of(tokenizer: Tokenizer, size: int, eos_ids: frozenset[int]) -> Vocabulary:
    """The tokens of a model, built once: first requests may come at the same time."""
    with _building:
        return _vocabulary_of(tokenizer, size, eos_ids)


class Grammar:
    """A grammar that is ready for any number of requests."""

    def __init__(self, source: str, vocabulary: Vocabulary) -> None:
        """Raises ValueError for a grammar that llguidance refuses."""
        self.source, self.vocabulary = source, vocabulary
        self.build()
        self._first.compute_bitmask()  # the first mask takes longest
        if why := reason_of(self._first):
            raise ValueError(why)

    def build(self) -> None:
        """Begin anew: copies of one matcher together may build so many states and no more."""
        self._first = build(self.vocabulary.tokenizer, self.source)

    def copy(self) -> Any:
        """A matcher of llguidance's for a new text."""
        return self._first.deep_copy()

    def matcher(self) -> "Matcher":
        """A matcher for a new text."""
        return Matcher(self)


class Matcher:
    """Where a text stands in its grammar: which tokens may come next, and which must."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar, self._matcher, self._vocabulary = grammar, grammar.copy(), grammar.vocabulary
        self._tokens: list[int] = []  # of the text
        self._num_restarts = 0  # since it last went on
        self._is_large = False  # its states are many: no draft shall add to them
        self._seen: tuple[Draft, np.ndarray] | None = None  # a draft, and its masks

    def mask(self, scores: Tensor, draft: Draft) -> Tensor:
        """Scores [n + 1, V] with −inf for what is forbidden after the pending and drafted tokens.

        Rows behind a forbidden token stay as they are; behind what was not explored all is −inf.
        Raises ValueError where the grammar cannot go on: a state of it may be too large.
        """
        seen, masks = self._seen or (None, None)
        if draft is not seen:
            _, masks = self._explore(draft)
        return scores + torch.from_numpy(masks).to(scores.device)

    def _explore(self, draft: Draft) -> tuple[set[int], np.ndarray]:
        """The drafted tokens that the text may go on with, and the masks [n + 1, V] to be added.

        Raises ValueError where the grammar cannot go on behind the pending token.
        """
        kept, shape = set[int](), (len(draft.tokens) + 1, self._vocabulary.size)
        masks = np.zeros(shape, np.float32)
        try:
            self._walk(draft, -1, kept, masks)
        except ValueError:  # drafts, and other texts, may have used up what llguidance allows
            self._restart([])
            self._walk(draft, -1, kept, masks)
        return kept, masks

    def _walk(self, draft: Draft, node: int, kept: set[int], masks: np.ndarray) -> None:
        """Explore a drafted token and all behind it; -1 is the pending token."""
        self._check()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        row = masks[node + 1]
        row[:] = _MASKS.take(bits).view(np.float32)[: len(row)]
        for child in draft.children(node):
            # Behind a whole text nothing is judged, and a rollback would go a token too far.
            if row[draft.tokens[child]] or self._matcher.is_stopped():  # −inf is true
                continue
            if self._is_large:  # the text may come there, and goes on with another pass
                masks[child + 1] = -inf
                continue
            self._matcher.consume_token(draft.tokens[child])
            try:
                self._walk(draft, child, kept, masks)
            except ValueError:  # the text may never come there: go on from here
                masks[child + 1] = -inf
                self._restart([draft.tokens[i] for i in draft.paths()[node]] if node >= 0 else [])
            else:
                kept.add(child)
                self._matcher.rollback(1)

    def _restart(self, more: list[int]) -> None:
        """Begin again with the text and these tokens: an error of llguidance's matcher stays."""
        self._num_restarts, self._is_large = self._num_restarts + 1, True
        if self._num_restarts <= _MOST_RESTARTS:
            if TOO_WIDE not in self._matcher.get_error():
                self._grammar.build()
            self._matcher = self._grammar.copy()
            self._matcher.consume_tokens([*self._tokens, *more])

    def consume(self, token: int) -> bool:
        """Go on with a token of the text. Returns whether the text is whole: nothing may follow.

        Raises ValueError for a forbidden token.
        """
        self._seen = None
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            self._restart([token])
            self._check()
        else:
            self._num_restarts = 0
        self._tokens.append(token)
        return self._matcher.is_stopped()

    def cut(self, draft: Draft, is_drawn: bool = False) -> Draft:
        """The draft without tokens that the grammar forbids, and without what follows them.

        `is_drawn`: it is judged by rejection and was drawn from q. To drop a token because of what
        was drawn would change the distribution, so the first forbidden one stays, to be rejected.
        """
        if self._is_large:
            return Draft()
        try:
            kept, masks = self._explore(draft)
        except ValueError:  # `mask` will raise it
            return Draft()
        paths = draft.paths()
        if is_drawn:
            kept |= {i for i, path in enumerate(paths) if kept.issuperset(path[:-1])}
        places = sorted(kept)
        if len(places) < len(paths):
            masks = masks[[0, *(i + 1 for i in places)]]
            draft = _part(draft, places)
        self._seen = draft, masks
        return draft

    def forced(self, most: int) -> list[int]:
        """At most `most` tokens of the text that must follow, as the tokenizer would write it.

        The text is certain, its tokens are not: the target may cut it into others.
        """
        text = self._matcher.compute_ff_bytes()[: _LONG_TOKEN * most]
        tokens = self._vocabulary.tokenizer.tokenize_bytes(text)[:most] if text else []
        return tokens[: self._matcher.validate_tokens(tokens)]

    @property
    def may_end(self) -> bool:
        """Whether the text is a whole one of the grammar."""
        return self._matcher.is_accepting()

    def _check(self) -> None:
        if why := reason_of(self._matcher):
            raise CannotGoOn(f"the grammar cannot go on: {why}")


def _part(draft: Draft, places: list[int]) -> Draft:
    """The drafted tokens at these rising indexes, each with all of its path among them."""
    part = draft.chain(places)
    if draft.parents is None:
        return part
    index = {-1: -1} | {old: new for new, old in enumerate(places)}
    return replace(part, parents=[index[draft.parents[i]] for i in places])
