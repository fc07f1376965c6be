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
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from messages import Draft, one_line

from .probe import Probe, error_of

JSON, REGEX, LARK, CHOICE = "json", "regex", "lark", "choice"  # kinds of grammars
_COMPACT = {"whitespace_flexible": False}  # free whitespace leaves next to nothing forced
_MOST_COMPILED = 64  # grammars that are stored
# Reasoning may stand before the text, or is under way when the text begins.
OPEN, POSSIBLE = "open", "possible"
_REASONING = """start: {first} @body
reasoning: {begin} rest
rest: {thoughts} /[ \\n]{{0,4}}/
until[suffix="</think>"]: /(.|\\n)*/
"""
_FIRST = {OPEN: "rest", POSSIBLE: "reasoning?"}
# By whether the tags are tokens of the vocabulary, which are no text to llguidance.
_TAGS = {
    False: {"begin": '"<think>"', "thoughts": "until"},
    True: {"begin": "<think>", "thoughts": r"/(.|\n)*/ </think>"},
}


def source_of(kind: str, value: Any, reasoning: str = "", has_tokens: bool = False) -> str:
    """A grammar as llguidance reads it. Raises ValueError for a value that is none of its kind.

    `value` is a schema, a regular expression, a text of rules (Lark's, or GBNF as llama.cpp has
    them), or a list of texts. With `reasoning` the grammar begins behind the end of that;
    `has_tokens` says that its tags are tokens of the vocabulary.
    """
    from llguidance import LLMatcher, grammar_from

    if kind == JSON:
        source = LLMatcher.grammar_from_json_schema(value, _COMPACT)
    else:
        names = {REGEX: "regex", LARK: "grammar", CHOICE: "choice"}
        source = grammar_from(names[kind], json.dumps(value) if kind == CHOICE else value)
    if not reasoning:
        return source
    is_list = source.startswith("{")
    body = json.loads(source)["grammars"][0] if is_list else {"lark_grammar": source}
    rules = _REASONING.format(first=_FIRST[reasoning], **_TAGS[has_tokens])
    return json.dumps({"grammars": [{"lark_grammar": rules}, body | {"name": "body"}]})


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
        self.compiled = lru_cache(_MOST_COMPILED)(self._compile)

    def _compile(self, source: str) -> "Grammar":
        self._probe.check(source)
        return Grammar(source, self)


vocabulary_of = lru_cache(2)(Vocabulary)


class Grammar:
    """A grammar that is ready for any number of requests."""

    def __init__(self, source: str, vocabulary: Vocabulary) -> None:
        """Raises ValueError for a grammar that llguidance refuses."""
        from llguidance import LLMatcher

        self.vocabulary = vocabulary
        self._first = LLMatcher(vocabulary.tokenizer, source, log_level=0)
        self._first.compute_bitmask()  # the first mask takes longest
        if self._first.is_error():
            raise ValueError(error_of(self._first))

    def matcher(self) -> "Matcher":
        """A matcher for a new text."""
        return Matcher(self._first.deep_copy(), self.vocabulary)


class Matcher:
    """Where a text stands in its grammar: which tokens may come next, and which must."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        """`matcher` is llguidance's, for a text that has not begun."""
        self._matcher, self._vocabulary = matcher, vocabulary

    def mask(self, scores: Tensor, draft: Draft) -> Tensor:
        """Scores [n + 1, V] with −inf for what is forbidden after the pending and drafted tokens.

        Rows behind a forbidden token stay as they are. Raises ValueError where the grammar cannot
        go on: a state of it may be too large.
        """
        forbidden = np.zeros(scores.shape, bool)
        self._note_forbidden(forbidden, draft, -1)
        return scores.masked_fill(torch.from_numpy(forbidden).to(scores.device), -inf)

    def _note_forbidden(self, forbidden: np.ndarray, draft: Draft, node: int) -> None:
        """Fill the rows of a drafted token and of all behind it; -1 is the pending token."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        row = forbidden[node + 1]
        row[:] = np.unpackbits(bits, count=len(row), bitorder="little") == 0
        for child in draft.children(node):
            # Behind a whole text nothing is judged, and a rollback would go a token too far.
            if not row[draft.tokens[child]] and not self._matcher.is_stopped():
                self._matcher.consume_token(draft.tokens[child])
                self._note_forbidden(forbidden, draft, child)
                self._matcher.rollback(1)

    def consume(self, token: int) -> bool:
        """Go on with a token of the text. Returns whether the text is whole: nothing may follow.

        Raises ValueError for a forbidden token.
        """
        self._matcher.consume_token(token)
        self._check()
        return self._matcher.is_stopped()

    def cut(self, draft: Draft, is_drawn: bool = False) -> Draft:
        """The draft without tokens that the grammar forbids, and without what follows them.

        `is_drawn`: it is judged by rejection and was drawn from q. To drop a token because of what
        was drawn would change the distribution, so the first forbidden one stays, to be rejected.
        """
        if draft.parents is None:
            count = self._matcher.validate_tokens(draft.tokens) + is_drawn
            return draft if count >= len(draft.tokens) else draft.chain(range(count))
        paths = draft.paths()
        allowed = [path for path in paths if self._allows([draft.tokens[i] for i in path])]
        if len(allowed) == len(paths):
            return draft
        places = {-1: -1} | {path[-1]: i for i, path in enumerate(allowed)}
        sure = draft.confidence and [draft.confidence[i] for i in places if i >= 0]
        parents = [places[draft.parents[path[-1]]] for path in allowed]
        return Draft([draft.tokens[path[-1]] for path in allowed], None, parents, sure)

    def _allows(self, tokens: list[int]) -> bool:
        return self._matcher.validate_tokens(tokens) == len(tokens)

    def forced(self, most: int) -> list[int]:
        """At most `most` tokens of the text that must follow, as the tokenizer would write it.

        The text is certain, its tokens are not: the target may cut it into others.
        """
        text = self._matcher.compute_ff_bytes()
        tokens = self._vocabulary.tokenizer.tokenize_bytes(text)[:most] if text else []
        return tokens[: self._matcher.validate_tokens(tokens)]

    @property
    def may_end(self) -> bool:
        """Whether the text is a whole one of the grammar."""
        return self._matcher.is_accepting()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"the grammar cannot go on: {one_line(error_of(self._matcher))}")
