"""Properties that hold for every input: hypothesis looks for the one for which they do not.

What the other files show on chosen cases is held here against plain strings and lists; the inputs
are wild on purpose. They follow from the code and not from chance: a run that passed passes again.
What a failing run prints is the smallest input that still fails.

    python -m pytest tests/test_properties.py
"""

import math
import os

import pytest
import speculative_decoding as core
import torch
from hypothesis import configuration, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kernels.decoder import Rows
from kernels.modules import FlatPlace
from sampling import TextStream

settings.register_profile("claims", deadline=None, derandomize=True, database=None)
settings.load_profile("claims")
# Tables of characters and constants would be kept even without a database: in the checkout.
configuration.set_hypothesis_home_dir(os.devnull)

# ---------------------------------------------------------------------- text, against plain strings

WORDS = [bytes([i]) for i in b"abEND \x80\xa9\xc3\xf0\xff"] + [b"aab", b"END", b"", "é🙂".encode()]
KINDS = st.sampled_from(["accepted", "recovered", "bonus"])
STOPS = ["a", "aab", "abaa", "END", "N", "\ufffda", "é🙂", "🙂é"]


class WordTokenizer:
    """Tokens are indexes of WORDS, some of which are parts of a character."""

    def decode(self, tokens, skip_special_tokens):
        return b"".join(WORDS[i] for i in tokens).decode("utf-8", "replace")


@given(
    st.lists(st.tuples(st.sampled_from(range(len(WORDS))), KINDS, st.booleans()), max_size=40),
    st.lists(st.sampled_from(STOPS), max_size=3),
)
@settings(max_examples=200)
def test_text_grows_as_a_plain_string_of_all_tokens_does(tokens, stops):
    """Each character has its kind; a stop string cuts, and what may become one is not shown yet."""
    tokenizer, growing = WordTokenizer(), TextStream(WordTokenizer(), stops)
    known, shown, is_cut = [], [], False  # characters with their kinds
    for count, (token, kind, is_end_of_cycle) in enumerate(tokens, 1):
        whole = tokenizer.decode([token for token, _, _ in tokens[:count]], True)
        if not whole.endswith("\ufffd"):
            known += [(character, kind) for character in whole[len(known) :]]
            cuts = [whole.index(stop) for stop in stops if stop in whole]
            is_cut, known = bool(cuts), known[: min(cuts, default=None)]
        assert growing.push(token, kind) == is_cut
        text = growing.text
        assert text == "".join(character for character, _ in known)
        if is_cut or is_end_of_cycle:
            shown += growing.release()
            held = {stop[:n] for stop in stops for n in range(1, len(stop))}
            may_be_shown = len(text) - max((len(h) for h in held if text.endswith(h)), default=0)
            assert characters(shown) == known[: max(may_be_shown, len(characters(shown)))]
        if is_cut:
            break
    shown += growing.release(final=True)
    assert characters(shown) == characters(growing.stretches()) == known


def characters(stretches):
    return [(character, kind) for text, kind in stretches for character in text]


# ------------------------------------------------------------------ the cache, against plain lists

MAX_LENGTH, NUM_LAYERS = 16, 2
UNSEEN = -1.0  # what a pad's states would be: never to be found in the cache


class CacheAgainstLists(RuleBasedStateMachine):
    """A SlotCache and, for each open row, the list of the numbers that were fed to it."""

    @initialize(num_rows=st.sampled_from([2, 1, 3, 5]))
    def make(self, num_rows):
        self.cache = core.SlotCache(NUM_LAYERS, num_rows, MAX_LENGTH, torch.device("cpu"))
        self.texts = {}
        self.next = 1.0  # no two tokens are alike

    @precondition(lambda self: len(self.texts) < self.cache.num_rows)
    @rule(data=st.data())
    def open_rows(self, data):
        for _ in range(data.draw(st.integers(1, self.cache.num_rows - len(self.texts)))):
            row = self.cache.open_row()
            assert row not in self.texts and 0 <= row < self.cache.num_rows
            self.texts[row] = []
        if len(self.texts) == self.cache.num_rows:
            with pytest.raises(ValueError, match="rows of the KV cache are in use"):
                self.cache.open_row()

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def close_rows(self, data):
        rows = st.lists(st.sampled_from(sorted(self.texts)), min_size=1, unique=True)
        for row in data.draw(rows):
            del self.texts[row]
            self.cache.close_row(row)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), num_cycles=st.integers(1, 4))
    def append(self, data, num_cycles):
        for _ in range(num_cycles):
            self.cycle(data)
            self.rows_hold_what_the_lists_hold()

    def cycle(self, data):
        """Append as one forward does, and keep a part; one row's numbers may be broken."""
        rows = data.draw(st.permutations(sorted(self.texts)))
        rows = rows[data.draw(st.integers(0, len(rows) - 1)) :]
        rows.sort(key=self.cache.slot)
        counts = [data.draw(st.integers(1, 5)) for _ in rows]
        fed = []
        for count in counts:
            fed.append([self.next + i for i in range(count)])
            self.next += count
        num_sound = data.draw(st.integers(0, 2 * counts[0]))
        fed[0] = [x if i < num_sound else math.nan for i, x in enumerate(fed[0])]
        longest = max(len(self.texts[row]) + n for row, n in zip(rows, counts, strict=True))
        if longest > MAX_LENGTH:
            with pytest.raises(ValueError, match=f"{longest} tokens do not fit a KV cache"):
                self.cache.place(rows, counts)
            return
        place = self.cache.place(rows, counts)
        if data.draw(st.booleans()):
            where = Rows()
            for row, slot, count in zip(rows, place.slots, counts, strict=True):
                where.chain(slot, self.cache.lengths[row], count)
            place = self.cache.current = FlatPlace(place, where)
        seen = [self.update(layer, place, fed) for layer in range(NUM_LAYERS)]
        self.cache.advance(place)
        for b, (row, new) in enumerate(zip(rows, fed, strict=True)):
            self.texts[row] += new
            assert self.cache.lengths[row] == len(self.texts[row])
            for layer, (keys, values) in enumerate(seen):  # what attention gets to see
                assert keys.shape[2] == values.shape[2] == place.end == longest
                at = place.slots[b] if isinstance(place, FlatPlace) else b
                self.assert_holds(layer, keys[at], values[at], self.texts[row])
        for row, count in zip(rows, counts, strict=True):  # of a chain, or of a branch
            drafted = self.texts[row][len(self.texts[row]) - count + 1 :]
            indexes = st.lists(st.integers(0, count - 2), unique=True) if drafted else st.just([])
            kept = data.draw(st.integers(0, count - 1).map(range) | indexes.map(sorted))
            self.cache.keep(row, count - 1, kept)
            self.texts[row][len(self.texts[row]) - count + 1 :] = [drafted[i] for i in kept]

    def update(self, layer, place, fed):
        if isinstance(place, FlatPlace):
            keys, values = states_of([number for numbers in fed for number in numbers], layer)
            keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        else:
            width = place.positions.shape[1]
            padded = [states_of([UNSEEN] * (width - len(new)) + new, layer) for new in fed]
            keys, values = (torch.stack(rows).transpose(1, 2) for rows in zip(*padded, strict=True))
        return self.cache.layers[layer].update(keys, values)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def truncate(self, data):
        row = data.draw(st.sampled_from(sorted(self.texts)))
        length = data.draw(st.integers(-1, len(self.texts[row]) + 1))
        if 0 <= length <= len(self.texts[row]):
            self.cache.truncate(row, length)
            del self.texts[row][length:]
        else:
            with pytest.raises(ValueError, match="cannot truncate"):
                self.cache.truncate(row, length)

    @invariant()
    def rows_hold_what_the_lists_hold(self):
        cache = self.cache
        assert sorted(cache.rows) == sorted(self.texts)
        assert sorted([*cache.rows, *cache._free]) == [*range(cache.num_rows)]
        assert cache.lengths == [len(self.texts.get(row, [])) for row in range(cache.num_rows)]
        for i, layer in enumerate(cache.layers if cache.layers[0].is_initialized else ()):
            for slot, row in enumerate(cache.rows):
                self.assert_holds(i, layer.keys[slot], layer.values[slot], self.texts[row])
            for buffer in (layer.keys, layer.values):  # 0 · NaN would be NaN, behind the mask, too
                assert buffer[len(self.texts) :].isfinite().all()

    def assert_holds(self, layer, keys, values, text):
        for held, expected in zip((keys, values), states_of(text, layer), strict=True):
            held = held[:, : len(text)].transpose(0, 1)
            assert torch.equal(held.nan_to_num(-7), expected.nan_to_num(-7))


def states_of(numbers, layer):
    """Keys [t, H, 1] and values [t, H, 2]: other numbers for each layer, head and place in them."""
    of_heads = torch.tensor(numbers)[:, None, None] * torch.tensor([[1.0], [0.5]]) * (layer + 1)
    return of_heads, torch.cat([of_heads + 0.25, of_heads + 0.125], dim=-1)


def test_the_cache_holds_what_plain_lists_hold():
    """Opened, closed, appended to (ragged), kept in part, truncated and refused in any order."""
    run_state_machine_as_test(
        CacheAgainstLists, settings=settings(max_examples=25, stateful_step_count=20)
    )
