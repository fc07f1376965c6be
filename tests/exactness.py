"""Compares the bits of a token's logits, however the token is computed.

One text is decoded token by token, verified, verified in batches and read as a prompt in pieces, at
lengths from 10 to 1 100, every other one close to a border of keys. The check at a server's start
asks the same with other texts and other code.
"""

import random
from typing import Any

import pytest
import torch
from conftest import open_rows

from runtime.cache import states

LONGEST = 1100
BORDERS = [block + step for block in (0, 512, 1024) for step in range(64, 513, 64)]


@torch.inference_mode()
def assert_same_bits(target: Any, rounds: int, chance: random.Random) -> None:
    """Decode, verify and read `rounds` times."""
    longest = min(LONGEST, target.max_length - 20)
    text = [chance.randrange(10, target.vocab_size) for _ in range(longest + 8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "NUM_MARKS", states.NUM_MARKS + 7)  # a text goes back several calls
        _compare_drafts(target, text, rounds, chance)
        for _ in range(max(rounds // 8, 2)):
            _compare_pieces(target, text[: chance.randrange(2, min(longest, 700))], chance)


def _fed(target: Any, rows: list[int], tokens: list[list[int]], num_logits: int) -> torch.Tensor:
    """The first row's logits; all rows hold afterwards what they held before."""
    held = [target.cache.lengths[row] for row in rows]
    logits = target.forward(rows, tokens, [min(num_logits, len(fed)) for fed in tokens]).logits
    for row, length in zip(rows, held, strict=True):
        target.cache.truncate(row, length)
    return logits[0]


def _compare_drafts(target: Any, text: list[int], rounds: int, chance: random.Random) -> None:
    """A draft's tokens one by one, at once, and in batches with others; all rows have the text."""
    cache, longest = target.cache, len(text) - 8
    with open_rows(target, text[:longest], *[[]] * (cache.num_rows - 1)) as rows:
        for buffer in cache.buffers():
            buffer[1:, :, :longest] = buffer[:1, :, :longest]
        for i in range(rounds):
            near = chance.choice([b for b in BORDERS if b < longest]) - chance.randrange(7)
            length = near if i % 2 else chance.randrange(10, longest)
            lengths = [length, *(chance.randrange(10, longest) for _ in rows[1:])]
            for row, held in zip(rows, lengths, strict=True):
                cache.lengths[row] = held
                for layer in cache.recurrent:
                    newest = layer._marks[rows[0]][-1]  # its state, as if that were `held` tokens
                    layer._marks[row] = [states.Mark(held, newest.tail, newest.state)]
            k = chance.randrange(1, 9)
            drafts = [text[held : held + k] for held in lengths]
            verified = _fed(target, rows[:1], drafts[:1], k)
            for j, token in enumerate(drafts[0]):
                alone = target.forward(rows[:1], [[token]], [1]).logits[0]
                assert torch.equal(alone, verified[j : j + 1]), f"decoded at {length + j}"
            cache.truncate(rows[0], length)
            for count in (len(rows), chance.randrange(2, len(rows) + 1)):
                beside = [drafts[0], *(d[: chance.randrange(1, k + 1)] for d in drafts[1:count])]
                logits = _fed(target, rows[:count], beside, k)
                assert torch.equal(logits, verified), f"{k} beside {count - 1} at {length}"


def _compare_pieces(target: Any, prompt: list[int], chance: random.Random) -> None:
    with open_rows(target, []) as (row,):
        whole = _fed(target, [row], [prompt], 6)
        while len(prompt) - target.cache.lengths[row] > 6:
            rest = prompt[target.cache.lengths[row] : -6]
            target.forward([row], [rest[: chance.randrange(1, 300)]], [1])
        last = _fed(target, [row], [prompt[target.cache.lengths[row] :]], 6)
        assert torch.equal(last, whole[-len(last) :]), f"a prompt of {len(prompt)} in pieces"
