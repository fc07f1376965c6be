"""Properties that hold for every input: hypothesis looks for the one for which they do not.

What the other files show on chosen cases is held here against a table of what is permitted, the
numbers that decide, and plain lists; the inputs are wild on purpose. They follow from the code and
not from chance: a run that passed passes again. What a failing run prints is the smallest input
that still fails.

    python -m pytest tests/test_properties.py
"""

import json
import math
import os
from dataclasses import replace
from itertools import product

import pytest
import speculative_decoding as core
import torch
from conftest import judge
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
from messages import RequestError
from sampling import TextStream, truncated_softmax
from serving.parsing import parse_fields, parse_json

settings.register_profile("claims", deadline=None, derandomize=True, database=None)
settings.load_profile("claims")
# Tables of characters and constants would be kept even without a database: in the checkout.
configuration.set_hypothesis_home_dir(os.devnull)
NO_NUMBERS = "no probabilities to draw from"

# -------------------------------------------------------------------------------- request parsing

MODEL, DRAFTERS = "some/model", ("ngram", "draft_model", "mtp")
LIMITS = {
    "max_tokens": (1, 1_000_000), "num_speculative_tokens": (0, 16), "top_k": (-1, 2**31),
    "seed": (-(2**63), 2**64 - 1), "logprobs": (0, 20),  # or a flag
    "temperature": (0.0, 100.0), "top_p": (1e-9, 1.0), "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-9, 100.0),
}  # fmt: skip
FLAGS = "speculative", "stream", "trace", "compare"
DEFAULTS = {
    "max_tokens": 128, "num_speculative_tokens": 5, "temperature": 0.0, "top_k": 0, "top_p": 1.0,
    "min_p": 0.0, "repetition_penalty": 1.0, "verification": "coupled", "seed": None,
    "drafter": "mtp",
}  # fmt: skip
TAKEN_AS_GIVEN = (*DEFAULTS.keys() - {"seed", "drafter"}, "stream", "trace", "compare")


def is_within(low, high):
    types = (int, float) if isinstance(low, float) else (int,)
    return lambda value: type(value) in types and low <= value <= high


def is_flag(value):
    return type(value) is bool


def is_text(value):
    return isinstance(value, str) and value.encode("utf-8", "ignore").decode("utf-8") == value != ""


def is_stop(value, is_one=False):
    if type(value) is list and not is_one:
        return len(value) <= 8 and all(is_stop(stop, True) for stop in value)
    return is_text(value) and len(value) <= 1000


def is_prompt(value):
    if isinstance(value, list):
        return value != [] and all(type(i) is int for i in value)
    return is_text(value) and not value.isspace()


def is_one_of(*choices):
    return lambda value: isinstance(value, str) and value in choices


PERMITTED = {
    **{name: is_within(*limits) for name, limits in LIMITS.items()},
    **dict.fromkeys(FLAGS, is_flag),
    "logprobs": lambda value: is_flag(value) or is_within(0, 20)(value),
    "stop": is_stop,
    "model": is_one_of(MODEL, "model"),
    "drafter": is_one_of(*DRAFTERS, "none"),
    "verification": is_one_of("coupled", "rejection"),
    "stream_options": lambda value: isinstance(value, dict),
    "prompt": is_prompt,
}

# With lone surrogates, which JSON can write as \ud800.
ANY_TEXT = st.text(max_size=5) | st.sampled_from(["\0", "😀", "\ud800", " ", "x"])
NUMBERS = (
    st.integers()
    | st.floats(allow_nan=False)  # infinity as well: that is how Python reads 1e999
    | st.sampled_from([0, 1, -1, 10**400, -(10**400), -0.0, 5e-324, -5e-324, 1e308, -1e308])
)
LEAVES = st.none() | st.booleans() | NUMBERS | ANY_TEXT | st.sampled_from([*DRAFTERS, MODEL])


ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=10,
)
ODD = st.sampled_from(
    [None, True, False, 1, 1.0, math.inf, "", " ", "\ud800", "a\udfff", [], [""], ["\ud800"], ["a"]]
    + [[1], [True], [1, True], [1.0], [[]], {}, {"a": []}, "ngram", "none", "mo", MODEL + "s"]
)
CHOSEN = {
    "stop": ["x" * 1000, "x" * 1001, ["x"] * 8, ["x"] * 9, ["x", ""]],
    "stream_options": [{}, {"include_usage": True}],
    "prompt": [" ", "\0😀", "\ud800x", [1], [1, True], [1.0], [], [10**400, -1]],
    "model": [MODEL, "model"],
    "drafter": [*DRAFTERS, "none"],
    "verification": ["coupled", "rejection"],
}
for name, (low, high) in LIMITS.items():  # on the limits and right behind them
    step = math.nextafter if isinstance(low, float) else lambda x, to: x + (1 if to > x else -1)
    CHOSEN[name] = [low, high, step(low, high), step(low, -math.inf), step(high, math.inf)]


@pytest.fixture(scope="module")
def parse(demo_engine):
    """parse_fields with the demo's tokenizer, made to read nothing in white space, as some do."""
    tokenizer, loaded = demo_engine.target.tokenizer, dict.fromkeys(DRAFTERS)

    def encode(text, verbose):
        return {"input_ids": []} if text.isspace() else tokenizer(text, verbose=verbose)

    return lambda body: parse_fields(body, encode, loaded, DEFAULTS, MODEL)


def assert_one_shape(error):
    """The one error body, of a caller's mistake, in text that can be sent."""
    body = error.body()
    assert 400 <= error.status < 500
    assert list(body) == ["error"] and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and body["error"]["param"] == error.param
    json.dumps(body, ensure_ascii=False).encode("utf-8")


def assert_taken_or_refused(parse, body):
    """Refused by the name of a wrong field, or every field as it was given, in its final type.

    A null is as good as no field.
    """
    given = {name: value for name, value in body.items() if value is not None}
    wrong = {n for n, permitted in PERMITTED.items() if n in given and not permitted(given[n])}
    wrong |= {"prompt"} - given.keys()
    if "stream_options" in given and given.get("stream") is not True:
        wrong.add("stream_options")
    try:
        fields, notes = parse(body)
    except RequestError as error:
        assert error.param in wrong
        return assert_one_shape(error)
    assert not wrong
    for name in TAKEN_AS_GIVEN:
        assert fields[name] == given.get(name, DEFAULTS.get(name, False))
        assert type(fields[name]) is float or not isinstance(DEFAULTS.get(name), float)
    prompt, stop, logprobs = (given.get(name) for name in ("prompt", "stop", "logprobs"))
    assert PERMITTED["prompt"](fields["prompt"])
    assert isinstance(prompt, str) or fields["prompt"] == prompt
    assert fields["stop"] == ((stop,) if isinstance(stop, str) else tuple(stop or ()))
    expected = {True: 0, False: None}.get(logprobs) if is_flag(logprobs) else logprobs
    assert fields["logprobs"] == expected and type(fields["logprobs"]) is type(expected)
    is_plain = given.get("speculative") is False or given.get("drafter") == "none"
    assert fields["drafter"] == (None if is_plain else given.get("drafter", DEFAULTS["drafter"]))
    assert PERMITTED["seed"](fields["seed"]) and given.get("seed", fields["seed"]) == fields["seed"]
    assert notes == []


@pytest.mark.parametrize("name", PERMITTED)
def test_a_field_is_taken_as_documented_or_refused_by_its_name(parse, name):
    """At its limits, right behind them, and with all that is odd."""

    @given(ODD | ANYTHING)
    @settings(max_examples=60)
    def check(value):
        for others in ({"prompt": "def fib(n):", "stream": True}, {"speculative": False}):
            assert_taken_or_refused(parse, {"prompt": [5]} | others | {name: value})

    check()
    for value in CHOSEN.get(name, []):
        assert_taken_or_refused(parse, {"prompt": "x", "stream": True, name: value})


@given(st.dictionaries(ANY_TEXT, ANYTHING | st.just([math.nan]), max_size=4), st.booleans())
@settings(max_examples=150)
def test_what_json_writes_is_read_back_but_for_numbers_that_it_does_not_have(body, ascii_only):
    data = json.dumps(body, ensure_ascii=ascii_only).encode("utf-8", "replace")
    try:
        json.dumps(body, allow_nan=False)
    except ValueError:
        with pytest.raises(RequestError, match="is not JSON"):
            parse_json(data)
    else:
        assert parse_json(data) == body or b"?" in data  # in the place of half a character


# ---------------------------------------------------------------------- text, against plain strings

WORDS = [bytes([i]) for i in b"abEND \x80\xa9\xc3\xf0\xff"] + [b"aab", b"END", b"", "é🙂".encode()]
KINDS = st.sampled_from(["accepted", "recovered", "bonus"])


class WordTokenizer:
    """Tokens are indexes of WORDS, some of which are parts of a character."""

    def decode(self, tokens, skip_special_tokens):
        return b"".join(WORDS[i] for i in tokens).decode("utf-8", "replace")


@given(
    st.lists(st.tuples(st.sampled_from(range(len(WORDS))), KINDS, st.booleans()), max_size=40),
    st.lists(
        st.sampled_from(["a", "aab", "abaa", "END", "N", "\ufffda", "é🙂", "🙂é"]), max_size=3
    ),
)
@settings(max_examples=400)
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


# ---------------------------------------------------------------------------------- broken logits


@given(
    st.sampled_from([2, 5, 320, 64 * 132]),  # the last one is searched in chunks
    st.sampled_from([math.nan, math.inf, None]),
    st.builds(
        core.Sampling,
        temperature=st.sampled_from([0.0, 1e-6, 0.7, 1.0, 30.0]),
        top_k=st.sampled_from([0, 1, 3]),
        top_p=st.sampled_from([1.0, 0.9, 1e-9]),
        min_p=st.sampled_from([0.0, 0.1, 1.0]),
    ),
    st.integers(0, 10**4),
    st.data(),
)
@settings(max_examples=120)
def test_no_token_is_chosen_by_broken_logits(vocab, number, sampling, where, data):
    """A NaN, an infinity or -inf everywhere, in a row that is judged; whatever is cut."""
    row = torch.linspace(-3, 3, vocab)[torch.arange(vocab) * 7 % vocab]
    scores = torch.stack([row.roll(i) for i in range(data.draw(st.integers(1, 4)))])

    def judged(scores):
        return core.verify(draft, core.own_choices(scores, sampling, core.Noise(0), 0))

    own = core.own_choices(scores[:-1], sampling, core.Noise(0), 0)
    draft = core.Draft([data.draw(st.sampled_from([token, where % vocab])) for token in own])
    known = judged(scores)
    at, broken = data.draw(st.integers(0, len(scores) - 1)), scores.clone()
    broken[at, slice(None) if number is None else where % vocab] = number or -math.inf
    if at >= sum(j.kind != "rejected" for j in known):
        assert judged(broken) == known
        return
    with pytest.raises(ValueError, match=NO_NUMBERS):
        judged(broken)
    for verification in ("coupled", "rejection"):
        with pytest.raises(ValueError, match=NO_NUMBERS):
            own = replace(sampling, verification=verification)
            core.sample(broken[at], [0], own, core.Noise(0))
    if not sampling.is_greedy:
        p = truncated_softmax(broken[: at + 1], *sampling.transforms)
        nothing, endless = torch.zeros(vocab), torch.full((vocab,), math.inf)
        for row, n in product((p[at], nothing, endless), (at, at + 1)):
            drafted = core.Draft((draft.tokens + [0])[:n])  # accepted before that row
            rows = torch.cat([p[:at], row[None], nothing[None]])[: n + 1]
            with pytest.raises(ValueError, match=NO_NUMBERS):
                judge(drafted, rows, [0.0] * (n + 1))


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
            place = self.cache.current = FlatPlace(place, *where.tensors())
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
        CacheAgainstLists, settings=settings(max_examples=40, stateful_step_count=20)
    )
