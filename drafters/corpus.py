"""A corpus: texts like the answers to come, in which the drafter suffix looks beside past outputs.

    --suffix-corpus answers.jsonl manual.txt

A line of a .jsonl file is a text, or an object: of its `messages` what the assistant says and the
arguments of its calls are taken, else the fields of FIELDS. Any other file is one text in UTF-8.

A corpus does not grow. So its places are sorted by the tokens before each, the nearest first:
places behind the same string lie side by side, and a binary search for each token finds them.

    text     a b c a b d          place   before it        where b was last, and a before that:
                                    1     a                places 2 and 5 lie side by side,
                                    4     a c b a          followed by c and d
                                    2     b a
                                    5     b a c b a
                                    3     c b a

That takes 8 bytes a token, where an index that grows takes 400.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from runtime.models.loading import PROGRESS
from runtime.values import in_short

from .pool import LOG
from .suffix import DEPTH, END, MOST, Match

MOST_TOKENS = 8_000_000  # that are read, and ends of texts: 64 MB
FIELDS = "text", "completion", "response", "output", "answer"
_PIECE = 1 << 18  # characters that are encoded at once
_LONGEST_LINE = 1 << 24  # characters
_TOLD = 8  # pieces between two lines of progress


class Corpus:
    """Texts in tokens, and their places sorted by the DEPTH tokens before each, nearest first."""

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        ended = [np.append(np.asarray(text, np.int32), np.int32(END)) for text in texts]
        tokens = np.concatenate([np.full(DEPTH, END, np.int32), *ended])
        size = len(tokens) - DEPTH
        # What stands 1, 2, … before each place; the last key counts most.
        keys = [tokens[DEPTH - back :][:size] for back in range(DEPTH, 0, -1)]
        # Looked up one by one, numbers of a memoryview come faster than those of an array.
        self._places = memoryview(np.lexsort(keys).astype(np.int32))
        self.tokens = memoryview(tokens[DEPTH:])

    def match(self, text: Sequence[int]) -> Match:
        """The longest suffix of `text`, of at most DEPTH tokens, that was followed in this one."""
        tokens, places, length = self.tokens, self._places, 0
        first, last = 0, len(places)
        for token in reversed(text[-DEPTH:]):

            def before(place: int, back: int = length + 1) -> int:
                return tokens[place - back] if place >= back else END

            begin = bisect_left(places, token, first, last, key=before)
            end = bisect_right(places, token, begin, last, key=before)
            if begin == end:
                break
            first, last, length = begin, end, length + 1
        if not length:
            return Match()
        found = last - first
        count = min(found, MOST)  # spread evenly: they are sorted by what stands further before
        some = (places[first + found * i // count] for i in range(count))
        return Match(length, sorted(some, reverse=True))


def load(files: Sequence[str], tokenizer: Any, vocab_size: int) -> Corpus:
    """The corpus of these files. Raises ValueError for one that cannot be read, or has no text."""
    texts, room = list[np.ndarray](), MOST_TOKENS
    for file in files:
        full = room
        try:
            for number, piece in enumerate(_pieces(Path(file))):
                if room <= 0:
                    break
                if not number % _TOLD:
                    PROGRESS.info("reading %s: %d tokens", Path(file).name, full - room)
                encoded = tokenizer(piece, add_special_tokens=False, verbose=False)
                for ids in encoded["input_ids"]:
                    text = np.array(ids[: max(0, room - 1)], np.int32)
                    text[text >= vocab_size] = END  # the model lacks it
                    texts.append(text)
                    room -= len(text) + 1
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read --suffix-corpus {file}: {in_short(error)}") from error
        if room == full > 0:
            raise ValueError(f"cannot read --suffix-corpus {file}: it has no text")
        if room <= 0:
            LOG.warning("--suffix-corpus: only the first %d tokens are read", MOST_TOKENS)
            break
    LOG.info("%d tokens of --suffix-corpus", sum(map(len, texts)))
    return Corpus(texts)


def _pieces(file: Path) -> Iterator[list[str]]:
    """A file's texts, about _PIECE characters at once. A text that is longer comes in parts."""
    piece, size = list[str](), 0
    with open(file, encoding="utf-8-sig") as opened:
        is_lines = file.suffix == ".jsonl"
        for text in _texts(opened) if is_lines else iter(lambda: opened.read(_PIECE), ""):
            for begin in range(0, len(text), _PIECE):
                piece.append(text[begin : begin + _PIECE])
                size += len(piece[-1])
                if size >= _PIECE:
                    yield piece
                    piece, size = [], 0
    if piece:
        yield piece


def _texts(lines: TextIO) -> Iterator[str]:
    """The texts of JSON lines. Raises ValueError for a line that can have none."""
    number = num_empty = 0
    while line := lines.readline(_LONGEST_LINE):
        number += 1
        if not line.strip():
            continue
        if len(line) == _LONGEST_LINE:
            raise ValueError(f"line {number} is longer than {_LONGEST_LINE} characters")
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError(f"line {number} is not JSON") from None
        fields = value if isinstance(value, dict) else {"text": value}
        if not {"messages", *FIELDS} & fields.keys():
            raise ValueError(f"line {number} has no text: it needs {', '.join(FIELDS)} or messages")
        texts = [*_said(fields.get("messages"))] or [fields.get(name) for name in FIELDS]
        texts = [text for text in texts if text and isinstance(text, str)]
        num_empty += not texts
        # A half of a pair of surrogates is no text.
        yield from (text.encode("utf-8", "replace").decode() for text in texts)
    if num_empty:
        LOG.warning("--suffix-corpus: %d of %d lines have no text", num_empty, number)


def _said(messages: Any) -> Iterator[Any]:
    """What an assistant says, and the arguments of its calls."""
    for turn in messages if isinstance(messages, list) else ():
        if not isinstance(turn, dict) or turn.get("role") != "assistant":
            continue
        content, calls = turn.get("content"), turn.get("tool_calls")
        parts = content if isinstance(content, list) else [{"text": content}]
        yield from (part.get("text") for part in parts if isinstance(part, dict))
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            yield function.get("arguments") if isinstance(function, dict) else None
