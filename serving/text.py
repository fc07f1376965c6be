"""From tokens to text, one token at a time: whole characters only, stop strings cut exactly.

A token may end in the middle of a multi-byte character, and a stop string may begin in one token
and end in another, or in the middle of an accepted draft. Text therefore leaves in three steps:

    push(token)  noted; where there are stop strings, decoded and searched at once
    text         what the answer will say so far
    release()    what may be streamed: the text less an ending that may yet become a stop string

Without stop strings a token is decoded when somebody asks for the text: of an answer that is not
streamed, at its end.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"  # what a tokenizer writes for the bytes of an unfinished character
_MOST_UNREAD = 64  # tokens that may wait for the end of a character: no text makes more wait


class TextStream:
    """The growing text of one request, with the origin (`kind`) of every piece of it.

    Nothing follows a stop string. However long the text is, a token takes the same time: only the
    text's end is looked at.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._waiting: list[tuple[int, str]] = []  # tokens with their kinds, not decoded yet
        self._is_complete = False  # no more tokens will come
        self._tokens: list[int] = []
        # _tokens[_start:_read] is decoded already; it only gives the decoder its context.
        self._start = self._read = 0
        self._pieces: list[tuple[str, str]] = []  # (text, kind)
        self._begins: list[int] = []  # of the pieces, in the text
        self._length = 0  # of the text; a stop string cuts the last pieces
        self._longest = max(map(len, self._stop), default=1)
        self._tail = ""  # the text's last `_longest` characters: a stop string may begin in there
        self._released = 0

    @property
    def text(self) -> str:
        """What the answer will say so far."""
        self._catch_up()
        return "".join(piece for piece, _ in self._pieces)[: self._length]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def push(self, token: int, kind: str) -> bool:
        """Append a token. True if it completed a stop string: the text then ends before that."""
        self._waiting.append((token, kind))
        return bool(self._stop) and self._catch_up()

    def _catch_up(self) -> bool:
        """Decode what waits. True if that completed a stop string."""
        is_stopped = False
        for token, kind in self._waiting:
            is_stopped = self._decode_next(token, kind)
        self._waiting.clear()
        return self._decode_rest() if self._is_complete else is_stopped

    def _decode_next(self, token: int, kind: str) -> bool:
        """The token's text, once its characters are complete."""
        self._tokens.append(token)
        whole = self._decode(self._tokens[self._start :])
        if whole.endswith(_INCOMPLETE) and len(self._tokens) - self._read < _MOST_UNREAD:
            return False
        new = whole[len(self._decode(self._tokens[self._start : self._read])) :]
        self._start, self._read = self._read, len(self._tokens)
        return self._append(new, kind)

    def _append(self, new: str, kind: str) -> bool:
        searched, tail = len(self._tail), self._tail + new
        found = [tail.find(s, max(0, searched - len(s) + 1)) for s in self._stop]
        cut = min((at for at in found if at >= 0), default=len(tail))
        self._pieces.append((new, kind))
        self._begins.append(self._length)
        self._length += cut - searched
        self._tail = tail[:cut][-self._longest :]
        return cut < len(tail)

    def finish(self) -> bool:
        """No more tokens will come: what bytes are left become text, as the tokenizer has them."""
        self._is_complete = True
        return bool(self._stop) and self._catch_up()

    def _decode_rest(self) -> bool:
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
        self._catch_up()
        begin, end = self._released, self._length
        if not final:
            end -= max(
                (n for s in self._stop for n in range(1, len(s)) if self._tail.endswith(s[:n])),
                default=0,
            )
        self._released = max(begin, end)
        return self.stretches(begin, self._released)

    def stretches(self, begin: int = 0, end: int | None = None) -> list[tuple[str, str]]:
        """text[begin:end] as (text, kind) stretches, neighbours that were accepted joined."""
        self._catch_up()
        end = self._length if end is None else min(end, self._length)
        result: list[tuple[str, str]] = []
        first = bisect_right(self._begins, begin) - 1  # the piece in which `begin` lies
        for i in range(max(0, first), bisect_left(self._begins, end)):
            at, (text, kind) = self._begins[i], self._pieces[i]
            piece = text[max(0, begin - at) : end - at]
            if piece and result and result[-1][1] == kind == "accepted":
                result[-1] = (result[-1][0] + piece, kind)
            elif piece:
                result.append((piece, kind))
        return result
