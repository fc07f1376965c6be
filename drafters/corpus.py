"""A corpus: texts like the answers to come, in which the drafter suffix looks beside past outputs.

    python 08_speculative_decoding.py --port 5000 --suffix-corpus answers.jsonl manual.txt

A line of a .jsonl file is one text, or an object that has it in a field of FIELDS; of `messages`
the assistant's are taken. Any other file is one text. UTF-8 is read.

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
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from runtime.values import in_short

from .suffix import DEPTH, END, MOST, Match

MOST_TOKENS = 8_000_000  # that are read: 64 MB, and some 500 MB while they are sorted
FIELDS = "text", "completion", "response", "output", "answer"
_PIECE = 1 << 18  # characters that are encoded at once
_TOLD = 8  # pieces between two lines of progress
LOG, PROGRESS = logging.getLogger("drafters"), logging.getLogger("progress")


class Corpus:
    """Texts in tokens, and their places sorted by the DEPTH tokens before each, nearest first."""

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        tokens = np.fromiter(chain.from_iterable((*text, END) for text in texts), np.int32)
        ranks, size = tokens.astype(np.int64) - END, 1  # of what ends here, of `size` tokens
        while size < DEPTH and len(ranks):
            before = np.zeros_like(ranks)  # before the first text there is an END, too
            before[size:] = ranks[:-size]
            ranks = np.unique(ranks * (ranks.max() + 1) + before, return_inverse=True)[1]
            size *= 2
        # Looked up one by one, numbers of a memoryview come faster than those of an array.
        self.tokens = memoryview(tokens)
        self._places = memoryview(np.argsort(ranks, kind="stable").astype(np.int32))

    def match(self, text: Sequence[int]) -> Match:
        """The longest suffix of `text`, of at most DEPTH tokens, that was followed in this one."""
        tokens, places, length = self.tokens, self._places, 0
        first, last = 0, len(places)
        for token in reversed(text[-DEPTH:]):

            def before(place: int, length: int = length) -> int:
                return tokens[place - length]  # tokens[-1] is an END

            begin = bisect_left(places, token, first, last, key=before)
            end = bisect_right(places, token, begin, last, key=before)
            if begin == end:
                break
            first, last, length = begin, end, length + 1
        if not length:
            return Match()
        some = range(first, last, max(1, (last - first) // MOST))[:MOST]
        return Match(length, sorted((places[i] + 1 for i in some), reverse=True))


def load(files: Sequence[str], tokenizer: Any, vocab_size: int) -> Corpus:
    """The corpus of these files. Raises ValueError for one that cannot be read, or has no text."""
    texts, room = list[np.ndarray](), MOST_TOKENS
    for file in files:
        before = room
        try:
            for number, piece in enumerate(_pieces(Path(file))):
                if not number % _TOLD:
                    PROGRESS.info("reading %s: %d tokens", Path(file).name, before - room)
                encoded = tokenizer(piece, add_special_tokens=False, verbose=False)
                for ids in encoded["input_ids"]:
                    text = np.array(ids[:room], np.int32)
                    text[text >= vocab_size] = END  # the model lacks it
                    texts.append(text)
                    room -= len(text)
                if not room:
                    break
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read --suffix-corpus {file}: {in_short(error)}") from error
        if room == before > 0:
            raise ValueError(f"cannot read --suffix-corpus {file}: it has no text")
    if not room:
        LOG.warning("--suffix-corpus: only the first %d tokens are read", MOST_TOKENS)
    LOG.info("%d tokens of --suffix-corpus", MOST_TOKENS - room)
    return Corpus(texts)


def _pieces(file: Path) -> Iterator[list[str]]:
    """A file's texts, about _PIECE characters at once; a text that is longer comes in parts."""
    piece, size = list[str](), 0
    with open(file, encoding="utf-8-sig") as opened:
        is_lines = file.suffix == ".jsonl"
        for text in _texts(opened) if is_lines else iter(lambda: opened.read(_PIECE), ""):
            piece, size = [*piece, text], size + len(text)
            if size >= _PIECE:
                yield piece
                piece, size = [], 0
    if piece:
        yield piece


def _texts(lines: Iterable[str]) -> Iterator[str]:
    """The texts of JSON lines. Raises ValueError for a line that has none."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError(f"line {number} is not JSON") from None
        fields = value if isinstance(value, dict) else {"text": value}
        messages = fields.get("messages")
        if isinstance(messages, list):
            turns = (turn for turn in messages if isinstance(turn, dict))
            said = (turn.get("content") for turn in turns if turn.get("role") == "assistant")
        else:
            said = (fields[name] for name in FIELDS if name in fields)
        texts = [text for text in said if isinstance(text, str)]
        if not texts and not isinstance(messages, list):
            raise ValueError(f"line {number} has no text: it needs {', '.join(FIELDS)} or messages")
        yield from texts
