"""From tokens to text, one token at a time: whole characters only, stop strings cut exactly.

A token may end in the middle of a multi-byte character, and a stop string may begin in one token
and end in another, or in the middle of an accepted draft. Text therefore leaves in three steps:

    push(token)  decoded once its characters are complete, and searched for stop strings
    text         what the answer will say so far
    release()    what may be streamed: the text less an ending that may yet become a stop string
"""

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"  # what a tokenizer writes for the bytes of an unfinished character


class TextStream:
    """The growing text of one request, with the origin (`kind`) of every stretch of it."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        # _tokens[_start:_read] is decoded already; it only gives the decoder its context.
        self._start = self._read = 0
        self._marks: list[tuple[int, str]] = []  # (end in text, kind)
        self._released = 0

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def push(self, token: int, kind: str) -> bool:
        """Append a token. True if it completed a stop string: the text then ends before that."""
        self._tokens.append(token)
        whole = self._decode(self._tokens[self._start :])
        if whole.endswith(_INCOMPLETE):
            return False
        new = whole[len(self._decode(self._tokens[self._start : self._read])) :]
        self._start, self._read = self._read, len(self._tokens)
        return self._append(new, kind)

    def _append(self, new: str, kind: str) -> bool:
        searched = len(self.text)
        self.text += new
        found = [self.text.find(s, max(0, searched - len(s) + 1)) for s in self._stop]
        cuts = [at for at in found if at >= 0]
        if cuts:
            self.text = self.text[: min(cuts)]
        self._marks.append((len(self.text), kind))
        return bool(cuts)

    def finish(self) -> bool:
        """No more tokens will come: what bytes are left become text, as the tokenizer has them."""
        if self._read == len(self._tokens):
            return False
        rest = self._decode(self._tokens[self._start :])
        new = rest[len(self._decode(self._tokens[self._start : self._read])) :]
        self._start = self._read = len(self._tokens)
        return self._append(new, "bonus")

    def release(self, final: bool = False) -> list[tuple[str, str]]:
        """The text that may be shown now and was not before, as (text, kind) stretches.

        Example: with the stop string "END", a text that ends in "… EN" keeps back "EN" until the
        next token.
        """
        begin, end = self._released, len(self.text)
        if not final:
            end -= max(
                (n for s in self._stop for n in range(1, len(s)) if self.text.endswith(s[:n])),
                default=0,
            )
        self._released = max(begin, end)
        return self.stretches(begin, self._released)

    def stretches(self, begin: int = 0, end: int | None = None) -> list[tuple[str, str]]:
        """text[begin:end] as (text, kind) stretches, neighbours of one kind joined."""
        end = len(self.text) if end is None else end
        result: list[tuple[str, str]] = []
        at = 0
        for mark, kind in self._marks:
            piece = self.text[max(at, begin) : min(mark, end)]
            at = max(at, mark)
            if piece and result and result[-1][1] == kind == "accepted":
                result[-1] = (result[-1][0] + piece, kind)
            elif piece:
                result.append((piece, kind))
        return result
