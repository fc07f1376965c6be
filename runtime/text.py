"""The growing text of a request: tokens are decoded, and stop strings detected, as they come."""

import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

_INCOMPLETE = "\ufffd"  # what a tokenizer writes for the bytes of an unfinished character
_MOST_UNREAD = 64  # the most tokens that wait for the end of a character; a text needs fewer


class TextStream:
    """The growing text of one request, with the origin (`kind`) of every piece of it.

    A token may end inside a character of several bytes, and a stop string may begin in one token
    and end in another, or inside an accepted draft. So text leaves in three steps:

        push(token)  notes a token; if there are stop strings, decodes and searches it at once
        text         the answer so far
        release()    what may be streamed: the text without an ending that may become a stop string

    Without stop strings a token is decoded when somebody asks for the text. The text ends before a
    stop string. Only its end is decoded and searched, so a long text takes no more time a token.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), stop_ids: Collection[int] = (),
        include_stop: bool = False, min_tokens: int = 0, before: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """With `include_stop` the text ends behind a stop string, and has the text of a stop id.

        A stop string counts if it is complete behind the first `min_tokens` tokens. The text goes
        on behind the tokens `before`: alone, a first word might lose the space before it.
        """
        self._tokenizer = tokenizer
        self._stop, self._stop_ids = sorted(stop), stop_ids
        self._include_stop, self._min_tokens = include_stop, min_tokens + len(before)
        self._first = re.compile("|".join(re.escape(s[0]) for s in stop) or "(?!)")
        self._begun = deque[int]()  # places of the text where one may have begun
        self._waiting: list[tuple[int, str]] = []  # tokens with their kinds, not decoded yet
        self._is_complete = False  # no more tokens will come
        self._tokens = [*before]
        # _tokens[_start:_read] is decoded already; it only gives the decoder its context.
        self._start, self._read = 0, len(before)
        self._pieces: list[tuple[str, str]] = []  # (text, kind)
        self._begins: list[int] = []  # where each piece begins in the text
        self._length = 0  # of the text: a stop string ends it before the last pieces end
        self._longest = max(map(len, self._stop), default=1)
        self._tail = ""  # the text's last `_longest` characters: a stop string may begin in there
        self._released = 0
        self.stopped_by: str | None = None  # the stop string that ended the text

    @property
    def text(self) -> str:
        """The answer so far."""
        self._catch_up()
        return "".join(piece for piece, _ in self._pieces)[: self._length]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def push(self, token: int, kind: str) -> bool:
        """Append a token. True if that ends the text: a stop id, or the end of a stop string."""
        is_end = token in self._stop_ids
        if self._include_stop or not is_end:
            self._waiting.append((token, kind))
        return (bool(self._stop) and self._catch_up()) or is_end

    def _catch_up(self) -> bool:
        """Decode the waiting tokens. True if they complete a stop string."""
        is_stopped = False
        for token, kind in self._waiting:
            self._tokens.append(token)
            is_stopped = self._decode_unread(kind)
        self._waiting.clear()
        if self._is_complete and self._read < len(self._tokens):
            is_stopped = self._decode_unread("bonus", is_last=True)
        return is_stopped

    def _decode_unread(self, kind: str, is_last: bool = False) -> bool:
        """Append the text of new tokens once its characters are complete, or as it is at the end.

        True if a stop string is complete.
        """
        whole = self._decode(self._tokens[self._start :])
        may_go_on = not is_last and len(self._tokens) - self._read < _MOST_UNREAD
        if may_go_on and whole.endswith(_INCOMPLETE):
            return False
        new = whole[len(self._decode(self._tokens[self._start : self._read])) :]
        # A context without text would have the next word lose the space before it.
        if new or self._read - self._start >= _MOST_UNREAD:
            self._start = self._read
        self._read = len(self._tokens)
        return self._append(new, kind)

    def _append(self, new: str, kind: str) -> bool:
        searched, tail = len(self._tail), self._tail + new
        stop = self._stop if len(self._tokens) > self._min_tokens else ()
        found = ((tail.find(s, max(0, searched - len(s) + 1)), len(s)) for s in stop)
        matches = [match for match in found if match[0] >= 0]
        begin, length = min(matches, default=(len(tail), 0))
        cut = begin + (length if self._include_stop else 0)
        self._begun += (self._length + match.start() for match in self._first.finditer(new))
        self._pieces.append((new, kind))
        self._begins.append(self._length)
        self._length += cut - searched
        self._tail = tail[:cut][-self._longest :]
        if matches:
            self.stopped_by = tail[begin : begin + length]
        return bool(matches)

    def finish(self) -> bool:
        """End the text and decode the bytes that are left. True if they complete a stop string."""
        self._is_complete = True
        return bool(self._stop) and self._catch_up()

    def release(self, final: bool = False) -> list[tuple[str, str]]:
        """The text that may be shown now and was not released yet, as (text, kind) stretches.

        Example: with the stop string "END", a text that ends in "… EN" keeps back "EN" until the
        next token.
        """
        self._catch_up()
        begin, num_held = self._released, 0 if final else self._num_held()
        self._released = max(begin, self._length - num_held)
        return self.stretches(begin, self._released)

    def _num_held(self) -> int:
        """How many characters at the text's end may become a stop string."""
        while self._begun:
            count = self._length - self._begun[0]
            end = self._tail[-count:] if count > 0 else ""
            # In order, the strings that go on from here are the next ones.
            at = bisect_right(self._stop, end)
            is_begun = len(end) == count and at < len(self._stop) and self._stop[at].startswith(end)
            if is_begun:
                return count
            self._begun.popleft()  # it will never be one
        return 0

    def stretches(self, begin: int = 0, end: int | None = None) -> list[tuple[str, str]]:
        """text[begin:end] as (text, kind) stretches; neighbouring accepted pieces are joined."""
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
