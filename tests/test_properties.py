"""Properties that hold for every input: hypothesis looks for the one for which they do not.

What the other files show on chosen cases is held here against a table of what is permitted,
integration over the uniform numbers, and plain lists; the inputs are wild on purpose. They follow
from the code and not from chance: a run that passed passes again. What a failing run prints is the
smallest input that still fails.

    python -m pytest tests/test_properties.py
"""

import json
import math
import os
from dataclasses import replace

import pytest
import speculative_decoding as core
import torch
from conftest import judge, run
from hypothesis import assume, configuration, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import messages
from drafters.ngram import NgramDrafter
from fastpath.forward import RaggedPlace
from serving import faults
from serving.parsing import RequestError, check_fields, parse_fields, parse_json

settings.register_profile("claims", deadline=None, derandomize=True, database=None)
settings.load_profile("claims")
# Tables of characters and constants would be kept even without a database: in the checkout.
configuration.set_hypothesis_home_dir(os.devnull)

# -------------------------------------------------------------------------------- request parsing

MODEL, DRAFTERS = "some/model", ("ngram", "draft_model", "mtp")
INTEGERS = {
    "max_tokens": (1, 1_000_000),
    "num_speculative_tokens": (0, 16),
    "top_k": (-1, 2**31),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, 20),  # or a flag
}
REAL_NUMBERS = {
    "temperature": (0, 100),
    "top_p": (1e-9, 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-9, 100),
}
FLAGS = "speculative", "stream", "trace", "compare"
DEFAULTS = {
    "max_tokens": 128,
    "num_speculative_tokens": 5,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "seed": None,
    "drafter": "mtp",
}
TAKEN_AS_GIVEN = (*DEFAULTS.keys() - {"seed", "drafter"}, "stream", "trace", "compare")


def is_within(limits, *types):
    return lambda value: type(value) in types and limits[0] <= value <= limits[1]


def is_flag(value):
    return type(value) is bool


def is_text(value):
    return isinstance(value, str) and value.encode("utf-8", "ignore").decode("utf-8") == value != ""


def is_stop(value):
    return is_text(value) and len(value) <= 1000


def is_list_of(permitted, lengths):
    return lambda value: (
        isinstance(value, list) and len(value) in lengths and all(map(permitted, value))
    )


def is_prompt(value):
    ids = is_list_of(lambda i: type(i) is int, range(1, 10**6))
    return ids(value) or (is_text(value) and not value.isspace())


PERMITTED = {
    **{name: is_within(limits, int) for name, limits in INTEGERS.items()},
    **{name: is_within(limits, int, float) for name, limits in REAL_NUMBERS.items()},
    **dict.fromkeys(FLAGS, is_flag),
    "logprobs": lambda value: is_flag(value) or is_within((0, 20), int)(value),
    "stop": lambda value: is_stop(value) or is_list_of(is_stop, range(9))(value),
    "model": lambda value: value in (MODEL, "model"),
    "drafter": lambda value: isinstance(value, str) and value in DRAFTERS,
    "stream_options": lambda value: isinstance(value, dict),
    "prompt": is_prompt,
}

UTF8_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
# With lone surrogates, which JSON can write as \ud800.
ANY_TEXT = st.text(st.characters(), max_size=5) | st.sampled_from(["\0", "😀", "\ud800", " ", "x"])
NUMBERS = (
    st.integers()
    | st.floats(allow_nan=False)  # infinity as well: that is how Python reads 1e999
    | st.sampled_from([0, 1, -1, 10**400, -(10**400), -0.0, 5e-324, -5e-324, 1e308, -1e308])
)
LEAVES = st.none() | st.booleans() | NUMBERS | ANY_TEXT | st.sampled_from([*DRAFTERS, MODEL])


def nested(leaves, names):
    """Lists and objects in lists and objects."""
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=9) | st.dictionaries(names, inner, max_size=4),
        max_leaves=10,
    )


ANYTHING = nested(LEAVES, ANY_TEXT)
NAMES = st.sampled_from([*PERMITTED]) | ANY_TEXT | st.sampled_from(["max_token", "Prompt", "K"])
BORDERS = {  # on the limits and right behind them
    **{n: st.sampled_from([low, high, low - 1, high + 1]) for n, (low, high) in INTEGERS.items()},
    **{
        n: st.sampled_from([low, high, math.nextafter(low, -1), math.nextafter(high, math.inf)])
        for n, (low, high) in REAL_NUMBERS.items()
    },
    "stop": st.sampled_from(["x" * 1000, "x" * 1001, ["x"] * 8, ["x"] * 9, ["x", ""]]),
    "stream_options": st.sampled_from([{}, {"include_usage": True}]),
    "prompt": st.sampled_from([" ", "\ud800x", [1], [1, True], [1.0], []]),
}
ODD = st.sampled_from(
    [True, False, 1, 1.0, math.inf, "", " ", "\ud800", "a\udfff", [], [""], ["\ud800"], ["a"], [1]]
    + [[True], [1, True], [1.0], [[]], {}, {"a": []}, "ngram", "none", "mo", MODEL + "s"]
)
SENSIBLE = {
    **{name: st.integers(*limits) for name, limits in INTEGERS.items()},
    **{name: st.floats(*limits) for name, limits in REAL_NUMBERS.items()},
    **dict.fromkeys(FLAGS, st.booleans()),
    "logprobs": st.integers(0, 20) | st.booleans(),
    "stop": UTF8_TEXT.filter(len) | st.lists(UTF8_TEXT.filter(len), max_size=9),
    "model": st.sampled_from([MODEL, "model"]),
    "drafter": st.sampled_from(DRAFTERS),
}


@st.composite
def bodies(draw):
    """A sensible request, and over it any fields of any value: else hardly one would be taken."""
    prompts = st.sampled_from(["def fib(n):", "\0😀"]) | st.lists(st.integers(), min_size=1)
    body = draw(st.fixed_dictionaries({"prompt": prompts}, optional=SENSIBLE))
    for name in draw(st.lists(NAMES, max_size=2)):
        body[name] = draw(BORDERS.get(name, ANYTHING) | ANYTHING)
    return body | {f"unknown{i:02}": i for i in range(draw(st.sampled_from([0, 0, 0, 16, 17])))}


@pytest.fixture(scope="module")
def parse(demo_engine):
    """parse_fields with the demo's tokenizer, made to read nothing in white space, as some do."""
    tokenizer, loaded = demo_engine.target.tokenizer, dict.fromkeys(DRAFTERS)

    def encode(text, verbose):
        return {"input_ids": []} if text.isspace() else tokenizer(text, verbose=verbose)

    return lambda body, **more: parse_fields(body, encode, loaded, DEFAULTS | more, MODEL)


def what_is_wrong(body):
    """The names of the fields that must be refused."""
    given = {name: value for name, value in body.items() if value is not None}
    wrong = {n for n, permitted in PERMITTED.items() if n in given and not permitted(given[n])}
    wrong |= {"prompt"} - given.keys()
    if "stream_options" in given and given.get("stream") is not True:
        wrong.add("stream_options")
    return wrong


def assert_one_shape(error):
    """The one error body, of a caller's mistake, in text that can be sent."""
    body = error.body()
    assert 400 <= error.status < 500
    assert list(body) == ["error"] and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and body["error"]["param"] == error.param
    json.dumps(body, ensure_ascii=False).encode("utf-8")


def assert_taken_or_refused(parse, body):
    """Refused by the name of a wrong field, or every field as it was given, in its final type."""
    wrong = what_is_wrong(body)
    try:
        fields, notes = parse(body)
    except RequestError as error:
        assert error.param in wrong
        assert_one_shape(error)
        return
    assert not wrong
    given = {name: value for name, value in body.items() if value is not None}
    for name in TAKEN_AS_GIVEN:
        assert fields[name] == given.get(name, DEFAULTS.get(name, False))
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        assert type(fields[name]) is float
    prompt, stop, logprobs = (given.get(name) for name in ("prompt", "stop", "logprobs"))
    assert PERMITTED["prompt"](fields["prompt"])
    assert isinstance(prompt, str) or fields["prompt"] == prompt
    assert fields["stop"] == ((stop,) if isinstance(stop, str) else tuple(stop or ()))
    expected = {True: 0, False: None}.get(logprobs) if is_flag(logprobs) else logprobs
    assert fields["logprobs"] == expected and type(fields["logprobs"]) is type(expected)
    is_plain = given.get("speculative") is False
    assert fields["drafter"] == (None if is_plain else given.get("drafter", DEFAULTS["drafter"]))
    assert PERMITTED["seed"](fields["seed"]) and given.get("seed", fields["seed"]) == fields["seed"]
    unknown = sorted(body.keys() - PERMITTED)
    assert len(notes) == min(len(unknown), 17)  # the last one counts those beyond 16
    for name, note in zip(unknown[:16], notes, strict=False):
        assert not name.isalnum() or not name.isascii() or f"unknown field {name!r} was" in note
    assert len(unknown) <= 16 or notes[16].startswith(f"{len(unknown) - 16} more")


@pytest.mark.parametrize("name", PERMITTED)
@given(st.data())
@settings(max_examples=80)
def test_a_field_is_taken_as_documented_or_refused_by_its_name(parse, name, data):
    value = data.draw(BORDERS.get(name, ODD) | SENSIBLE.get(name, ODD) | ODD | ANYTHING)
    assert_taken_or_refused(parse, {"prompt": "def fib(n):", "stream": True, name: value})


@given(bodies())
@settings(max_examples=300)
def test_an_object_is_taken_as_documented_or_refused_by_the_name_of_a_wrong_field(parse, body):
    assert_taken_or_refused(parse, body)


@given(st.dictionaries(NAMES, ANYTHING, max_size=4) | bodies())
@settings(max_examples=200)
def test_the_check_of_fields_passes_what_is_permitted_and_drops_nulls(body):
    checked = PERMITTED.keys() - {"model", "drafter", "stream_options", "prompt"}
    wrong = what_is_wrong(body) & checked
    try:
        given = check_fields(body)
    except RequestError as error:
        assert error.param in wrong
        assert_one_shape(error)
        return
    assert not wrong
    assert given == {name: value for name, value in body.items() if value is not None}


@given(bodies(), st.sets(st.sampled_from([*PERMITTED])))
@settings(max_examples=200)
def test_a_null_is_as_good_as_no_field(parse, body, names):
    def outcome(body):
        try:
            return parse(body, seed=5)
        except RequestError as error:
            return error.status, error.body()

    absent = {name: value for name, value in body.items() if name not in names}
    assert outcome(absent | dict.fromkeys(names)) == outcome(absent)


DAMAGE = b'NaN -Infinity 1e999 " { ] , \\ud800 \xff \xef\xbb\xbf'.split()


@st.composite
def damaged_json(draw):
    """An object's bytes, cut, overwritten or with something put between them."""
    text = json.dumps(draw(st.dictionaries(NAMES, ANYTHING, max_size=3)))
    data = bytearray(text.encode(draw(st.sampled_from(["utf-8", "utf-8", "utf-16", "utf-32"]))))
    for _ in range(draw(st.integers(0, 3))):
        begin, length = draw(st.integers(0, len(data))), draw(st.integers(0, 3))
        data[begin : begin + length] = draw(st.binary(max_size=3) | st.sampled_from(DAMAGE))
    return bytes(data)


def repeated(opening, closing, count):
    return b'{"a": ' + opening * count + closing * count + b"}"


TOO_LARGE = st.builds(
    repeated,
    st.sampled_from([b"[", b'{"a":', b"9", b"-"]),
    st.sampled_from([b"]", b"}", b"0", b""]),
    st.sampled_from([1, 1_000, 5_000, 300_000]),
)


@given(st.binary() | damaged_json() | ANYTHING.map(json.dumps).map(str.encode) | TOO_LARGE)
@settings(max_examples=300)
def test_any_bytes_are_an_object_or_a_refusal(data):
    try:
        assert type(parse_json(data)) is dict
        data.decode("utf-8")
    except RequestError as error:
        assert error.status == 400 and error.param is None
        assert_one_shape(error)


@given(
    st.dictionaries(
        UTF8_TEXT,
        nested(
            st.none() | st.booleans() | UTF8_TEXT | NUMBERS.filter(lambda x: abs(x) != math.inf),
            UTF8_TEXT,
        ),
        max_size=4,
    ),
    st.booleans(),
)
@settings(max_examples=200)
def test_what_json_writes_is_read_back(body, ascii_only):
    assert parse_json(json.dumps(body, ensure_ascii=ascii_only).encode("utf-8")) == body


@given(
    st.recursive(
        st.sampled_from([math.nan, math.inf, -math.inf]),
        lambda inner: (
            st.tuples(st.lists(LEAVES, max_size=2), inner).map(lambda pair: [*pair[0], pair[1]])
            | st.builds(lambda name, value: {"a": 1, name: value}, UTF8_TEXT, inner)
        ),
        max_leaves=3,
    )
)
@settings(max_examples=60)
def test_numbers_that_json_does_not_have_are_refused_wherever_they_stand(value):
    with pytest.raises(RequestError, match="is not JSON"):
        parse_json(json.dumps({"prompt": "x", "top_p": value}).encode())


# ----------------------------------------------------------------------------------------- verify

WEIGHTS = (
    st.integers(0, 4).map(float) | st.floats(0, 1, width=32) | st.sampled_from([0.0, 1e-7, 1e-30])
)


@st.composite
def distributions(draw, vocab):
    """A row [V] of probabilities, often with zeros, now and then one-hot."""
    weights = draw(st.lists(WEIGHTS, min_size=vocab, max_size=vocab) | st.just([0.0] * vocab))
    if sum(weights) < 1e-30:
        weights[draw(st.integers(0, vocab - 1))] = 1.0
    row = torch.tensor(weights, dtype=torch.float64)
    return (row / row.sum()).float()


@st.composite
def drafts_from(draw, p):
    """q of its own, of p, or of what p excludes; a row for each of p's but the last."""
    rows = []
    for row in p[:-1]:
        kind = draw(st.sampled_from(["own", "own", "same", "disjoint"]))
        q = row if kind == "same" else draw(distributions(len(row)))
        if kind == "disjoint" and (row == 0).any():
            excluded = (row == 0).float()
            q = excluded / excluded.sum()
        rows.append(q)
    return torch.stack(rows) if rows else torch.zeros(0, p.shape[-1])


@st.composite
def judged_cases(draw):
    """(draft, p): n of 0 to 4 tokens, each with q > 0, or drafted without probs."""
    vocab, n = draw(st.integers(2, 6)), draw(st.integers(0, 4))
    p = torch.stack([draw(distributions(vocab)) for _ in range(n + 1)])
    if draw(st.booleans()):
        return core.Draft(draw(st.lists(st.integers(0, vocab - 1), min_size=n, max_size=n))), p
    q = draw(drafts_from(p))
    tokens = [draw(st.sampled_from(row.nonzero()[:, 0].tolist())) for row in q]
    return core.Draft(tokens, q), p


UNIFORMS = st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 0.5, 1 - 2**-53])


@given(judged_cases(), st.data())
@settings(max_examples=300)
def test_verify_keeps_a_prefix_and_adds_one_token_that_the_target_permits(case, data):
    draft, p = case
    n, drafted = len(draft.tokens), [*enumerate(draft.tokens)]
    q = [1.0] * n if draft.probs is None else [float(draft.probs[i, d]) for i, d in drafted]
    ratios = [min(float(p[i, d]) / q[i], 1 - 2**-53) for i, d in drafted]
    numbers = [data.draw(UNIFORMS | st.just(ratio)) for ratio in ratios] + [data.draw(UNIFORMS)]
    judged = judge(draft, p, numbers)

    accepted = [j for j in judged if j.kind == "accepted"]
    a = len(accepted)
    assert [j.id for j in accepted] == draft.tokens[:a]
    assert [j.kind for j in judged[a:]] == (["bonus"] if a == n else ["rejected", "recovered"])
    for i, j in enumerate(judged[: min(a + 1, n)]):  # the accepted, and the rejected one
        assert (j.id, j.u, j.p, j.q) == (draft.tokens[i], numbers[i], p[i, j.id], q[i])
        equal = pytest.approx(j.p, rel=1e-9, abs=0)  # then rounding may decide
        assert j.u * j.q == equal or (j.u * j.q < j.p) == (j.kind == "accepted")
    last = judged[-1]
    assert last.u == numbers[-1] and last.p == float(p[a, last.id])
    if last.kind == "bonus":
        assert last.q is None
    elif draft.probs is None:
        assert last.q == 0 and last.id != draft.tokens[a]
    else:
        assert last.q == float(draft.probs[a, last.id])
    assert all(j.p > 0 for j in judged if j.kind != "rejected")


NOISE = core.Noise(0)
GRID = [(i + 0.5) / 100 for i in range(100)]


def emitted_at(position, draft, p, q):
    """The chances [V] of the token emitted at `position`, the drafts before it being accepted.

    Over what may be drafted there, weighed by q, and over a grid of the two numbers that decide.
    Exact to 0.02: the share accepted is off by half a step of the grid, that drawn by one at most.
    """
    emitted = torch.zeros(p.shape[-1], dtype=torch.float64)
    n = len(draft.tokens)

    def token(draft, u, last_u):
        numbers = [0.0] * position + [u] * (n - position) + [last_u]
        judged = judge(draft, p, numbers)
        assert all(j.kind == "accepted" for j in judged[:position])
        return next(j for j in judged[position:] if j.kind != "rejected")

    if position == n:
        for last_u in GRID:
            emitted[token(draft, 0.0, last_u).id] += 1 / len(GRID)
        return emitted
    for drafted, chance in enumerate(q[position].tolist()):
        if not chance:
            continue
        tokens = list(draft.tokens)
        tokens[position] = drafted
        other = core.Draft(tokens, draft.probs)
        kinds = [token(other, u, 0.5).kind for u in GRID]
        accepted = kinds.count("accepted") / len(GRID)
        emitted[drafted] += chance * accepted
        for last_u in GRID if accepted < 1 else ():
            recovered = token(other, GRID[-1], last_u).id
            emitted[recovered] += chance * (1 - accepted) / len(GRID)
    return emitted


@given(judged_cases(), st.data())
@settings(max_examples=100)
def test_verify_emits_exactly_p_at_every_position(case, data):
    draft, p = case
    n = len(draft.tokens)
    q = draft.probs
    if q is None:
        q = torch.nn.functional.one_hot(torch.tensor(draft.tokens).long(), p.shape[-1]).float()
    position = data.draw(st.integers(0, n))
    for i in range(position):  # so that it can come to this position
        both = ((p[i] > 0) & (q[i] > 0)).nonzero()[:, 0].tolist()
        assume(both)
        draft.tokens[i] = data.draw(st.sampled_from(both))
    emitted = emitted_at(position, draft, p, q)
    torch.testing.assert_close(emitted, p[position].double(), rtol=0, atol=0.02)


@pytest.mark.parametrize("value", [math.nan, 0.0], ids=str)
@given(judged_cases(), st.data())
@settings(max_examples=100)
def test_verify_draws_no_token_from_a_row_without_probabilities(value, case, data):
    """NaN is what softmax makes of broken logits; rows behind the first rejection do not count."""
    draft, p = case
    n = len(draft.tokens)
    numbers = data.draw(st.lists(UNIFORMS, min_size=n + 1, max_size=n + 1))
    judged = judge(draft, p, numbers)
    num_rows = sum(j.kind != "rejected" for j in judged)
    broken, row = p.clone(), data.draw(st.integers(0, n))
    broken[row] = value
    if row < num_rows:
        with pytest.raises(ValueError, match="no probabilities to draw from"):
            judge(draft, broken, numbers)
    else:
        assert judge(draft, broken, numbers) == judged


@given(UNIFORMS)
def test_no_token_is_drawn_by_infinite_weights(u):
    with pytest.raises(ValueError, match="no probabilities to draw from"):
        core.draw(torch.tensor([0.0, math.inf, 0.5]), u)


def break_row(row, kind, where):
    """A copy of the logits [V] that is no longer one to choose from."""
    row = row.clone()
    if kind == "nothing":
        row[:] = -math.inf
    else:
        row[where % len(row)] = {"nan": math.nan, "inf": math.inf}[kind]
    return row


BREAKS = "nan", "inf", "nothing"


@given(
    st.sampled_from([2, 5, 320, 64 * 132]),  # the last one is searched in chunks
    st.sampled_from(BREAKS),
    st.integers(0, 10**4),
    st.builds(
        core.Sampling,
        temperature=st.sampled_from([1e-6, 0.7, 1.0, 30.0]),
        top_k=st.sampled_from([0, 1, 3]),
        top_p=st.sampled_from([1.0, 0.9, 1e-9]),
        min_p=st.sampled_from([0.0, 0.1, 1.0]),
    ),
)
@settings(max_examples=200)
def test_no_transform_makes_probabilities_of_broken_logits(vocab, kind, where, sampling):
    logits = torch.linspace(-3, 3, vocab)[torch.arange(vocab) * 7 % vocab]
    scores = torch.stack([break_row(logits, kind, where), logits])
    p = core.probabilities(scores, sampling)
    for drafted in ([], [where % vocab]):
        with pytest.raises(ValueError, match="no probabilities to draw from"):
            core.verify_by_rejection(core.Draft(drafted), p[: len(drafted) + 1], NOISE, 0)
        with pytest.raises(ValueError, match="no probabilities to draw from"):
            core.verify(core.Draft(drafted), core.own_choices(scores, sampling, NOISE, 0))
    for own in (sampling, core.Sampling(), replace(sampling, verification="rejection")):
        with pytest.raises(ValueError, match="no probabilities to draw from"):
            core.sample(scores[0], [0], own, NOISE)
    assert len(core.verify_by_rejection(core.Draft(), p[1:], NOISE, 0)) == 1
    assert len(core.verify(core.Draft(), core.own_choices(scores[1:], sampling, NOISE, 0))) == 1


@st.composite
def greedy_cases(draw):
    """(draft, scores): some drafts are the target's choice, some are not; -inf is a score."""
    vocab, n = draw(st.integers(2, 6)), draw(st.integers(0, 4))
    values = st.floats(-100, 100, width=32) | st.just(-math.inf)
    rows = st.lists(values, min_size=vocab, max_size=vocab)
    scores = torch.tensor([draw(rows) for _ in range(n + 1)])
    scores[:, draw(st.integers(0, vocab - 1))].clamp_(min=-100)  # one at least can be chosen
    best = scores[:n].argmax(-1).tolist()
    tokens = [draw(st.just(token) | st.integers(0, vocab - 1)) for token in best]
    if draw(st.booleans()):
        return core.Draft(tokens), scores
    q = [draw(distributions(vocab)) + 1e-3 for _ in tokens]
    return core.Draft.of([(t, row / row.sum()) for t, row in zip(tokens, q, strict=True)]), scores


def verify_greedy(draft, scores):
    return core.verify(draft, core.own_choices(scores, core.Sampling(), NOISE, 0))


@given(greedy_cases(), st.data())
@settings(max_examples=200)
def test_greedy_verification_is_that_of_rejection_with_a_one_hot_p(case, data):
    draft, scores = case
    numbers = [data.draw(UNIFORMS) for _ in scores]
    one_hot = core.probabilities(scores, core.Sampling())
    by_chance = judge(draft, one_hot, numbers)
    assert [j[:2] for j in verify_greedy(draft, scores)] == [j[:2] for j in by_chance]


@given(greedy_cases(), st.sampled_from(BREAKS), st.data())
@settings(max_examples=200)
def test_greedy_verification_refuses_broken_logits_in_the_rows_that_it_judges(case, kind, data):
    draft, scores = case
    judged = verify_greedy(draft, scores)
    num_rows = sum(j.kind != "rejected" for j in judged)
    row, where = data.draw(st.integers(0, len(scores) - 1)), data.draw(st.integers(0, 5))
    broken = scores.clone()
    broken[row] = break_row(broken[row], kind, where)
    if row < num_rows:
        with pytest.raises(ValueError, match="no probabilities to draw from"):
            verify_greedy(draft, broken)
    else:
        assert verify_greedy(draft, broken) == judged


# ----------------------------------------------------------------- a broken target, in a batch

NUM_REQUESTS, MAX_TOKENS, K = 3, 14, 3
CYCLES = 2, 1, 3, 0  # none is done by then: 1 + 3 (K + 1) < MAX_TOKENS
SAMPLINGS = core.Sampling(), core.Sampling(1.1, 1.0, 0, 0.9)
HOWS = st.tuples(st.sampled_from([None, *DRAFTERS]), st.sampled_from(SAMPLINGS))


@pytest.fixture(scope="module")
def batch(prompts):
    """The embedded models with three short rows; (engine, requests, their outputs alone)."""
    options = core.Options(max_running=NUM_REQUESTS, max_model_len=64, fixed_k=True)
    engine, known = core.load_engine(options), {}
    engine.eos_ids = set()  # every request takes all its tokens

    def request(i, how):
        drafter, sampling = how
        prompt = prompts[("repetitive_colours", "hard_prose", "code_class")[i]]
        return core.Request(prompt, MAX_TOKENS, drafter, K, sampling=sampling, seed=i)

    def alone(i, how):
        if (i, how) not in known:
            wanted = vars(request(i, how))
            known[i, how] = run(engine, **wanted)[0].output
            assert len(known[i, how]) == MAX_TOKENS
        return known[i, how]

    return engine, request, alone


def break_target(engine, victim, cycle, kind, where):
    """engine.target.forward, but for the victim's logits in that cycle (NaN is cached as well)."""
    forward, cache = engine.target.forward, engine.target.cache

    @torch.inference_mode()
    def broken(rows, tokens, num_logits, layers=()):
        output = forward(rows, tokens, num_logits, layers)
        if victim.finish_reason is None and victim.num_steps == cycle:
            b, slot = rows.index(victim.row), cache._rows.index(victim.row)
            output.logits[b] = torch.stack(
                [break_row(row, kind, where) for row in output.logits[b]]
            )
            for layer in cache.layers if kind == "nan" else ():
                layer.keys[slot, :, : cache.lengths[victim.row]] = math.nan
        return output

    return broken


@pytest.mark.parametrize("kind", BREAKS)
@given(
    st.tuples(*[HOWS] * NUM_REQUESTS),
    st.integers(0, NUM_REQUESTS - 1),
    st.sampled_from(CYCLES),
    st.integers(0, 4095),
    st.booleans(),
)
@settings(max_examples=14)
def test_a_broken_target_fails_one_request_and_changes_no_other(
    batch, kind, hows, hit, cycle, where, closes_at_once
):
    engine, request, alone = batch
    expected = [alone(i, how) for i, how in enumerate(hows)]
    sequences = [engine.open(request(i, how)) for i, how in enumerate(hows)]
    victim = sequences[hit]
    closed = []
    with pytest.MonkeyPatch.context() as patch:
        broken = break_target(engine, victim, cycle, kind, where)
        patch.setattr(engine.target, "forward", broken)
        while running := [s for s in sequences if s.finish_reason is None]:
            cycles = faults.step(engine, running)
            assert all((s in cycles) == (s.failure is None) for s in running)
            if victim.failure and closes_at_once and not closed:
                engine.close(victim)
                closed.append(victim)
    for s in sequences:
        if s not in closed:
            engine.close(s)
    assert victim.finish_reason == "error" and isinstance(victim.failure, ValueError)
    assert victim.num_steps == cycle  # what it gave before was right
    assert victim.output == expected[hit][: len(victim.output)]
    for i, s in enumerate(sequences):
        assert s.seat.warnings == []
        assert s is victim or (s.failure, s.output) == (None, expected[i])

    drafters = engine.panel.drafters
    caches = [engine.target.cache, drafters["draft_model"]._draft.cache, drafters["mtp"]._cache]
    for cache in caches:
        assert sorted(cache._free) == [*range(NUM_REQUESTS)] and not any(cache.lengths)
    again = run(engine, **vars(request(hit, hows[hit])))[0]  # in a slot that was broken, too
    assert again.output == expected[hit]


# ------------------------------------------------------------------ the cache, against plain lists

MAX_LENGTH, NUM_LAYERS = 16, 2
ROWS = (1, 2, 4, 8, 16, 32)
UNSEEN = -1.0  # what a pad's states would be: never to be found in the cache


class CacheAgainstLists(RuleBasedStateMachine):
    """A SlotCache and, for each open row, the list of the numbers that were fed to it."""

    @initialize(
        num_rows=st.sampled_from([2, 1, 3, 5]), min_rows=st.integers(1, 8), whole=st.booleans()
    )
    def make(self, num_rows, min_rows, whole):
        rows = ROWS if whole else core.Shapes().rows
        self.shapes = core.Shapes(rows, min_rows, key_steps=(4, 8) if whole else ())
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
        """Append as one forward does, and truncate; in one row the model may have broken down."""
        rows = data.draw(st.permutations(sorted(self.texts)))
        rows = rows[data.draw(st.integers(0, len(rows) - 1)) :]
        fed = []
        for _ in rows:
            count = data.draw(st.integers(1, 5))
            fed.append([self.next + i for i in range(count)])
            self.next += count
        num_sound = data.draw(st.integers(0, 2 * len(fed[0])))
        fed[0] = [x if i < num_sound else math.nan for i, x in enumerate(fed[0])]
        order = sorted(range(len(rows)), key=lambda b: self.cache._rows.index(rows[b]))
        rows, fed = [rows[b] for b in order], [fed[b] for b in order]
        counts = [len(new) for new in fed]
        longest = max(len(self.texts[row]) + len(new) for row, new in zip(rows, fed, strict=True))
        if longest > MAX_LENGTH:
            with pytest.raises(ValueError, match=f"{longest} tokens do not fit a KV cache"):
                self.cache.place(rows, counts)
            return
        width = data.draw(st.integers(0, 8))
        place = self.cache.place(rows, counts, width, self.shapes.kv_length(longest))
        if len(rows) > 1 and data.draw(st.booleans()):
            place = RaggedPlace(place, self.shapes.run_rows(sum(counts)))
            self.cache.current = place
        flat = data.draw(st.booleans())
        seen = [self.update(layer, place, fed, flat) for layer in range(NUM_LAYERS)]
        self.cache.advance(place)
        for b, (row, new) in enumerate(zip(rows, fed, strict=True)):
            self.texts[row] += new
            assert self.cache.lengths[row] == len(self.texts[row])
            for layer, (keys, values) in enumerate(seen):  # what attention gets to see
                assert keys.shape[2] == values.shape[2] == place.kv_length >= longest
                self.assert_holds(layer, keys[b], values[b], self.texts[row])
        for row, new in zip(rows, fed, strict=True):
            length = len(self.texts[row]) - data.draw(st.sampled_from(range(len(new))))
            self.cache.truncate(row, length)
            del self.texts[row][length:]

    def update(self, layer, place, fed, flat):
        if isinstance(place, RaggedPlace):
            new = [number for numbers in fed for number in numbers]
            spare = place.positions.shape[1] - len(new)
            keys, values = states_of(new + [UNSEEN] * spare, layer)
            if flat:
                return self.cache.layers[layer].update(keys, values)
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
        assert sorted(cache._rows) == sorted(self.texts)
        assert sorted([*cache._rows, *cache._free]) == [*range(cache.num_rows)]
        assert cache.lengths == [len(self.texts.get(row, [])) for row in range(cache.num_rows)]
        for i, layer in enumerate(cache.layers if cache.layers[0].is_initialized else ()):
            for slot, row in enumerate(cache._rows):
                self.assert_holds(i, layer.keys[slot], layer.values[slot], self.texts[row])
            for buffer in (layer.keys, layer.values):  # 0 · NaN would be NaN, behind the mask, too
                assert buffer[len(self.texts) :].isfinite().all()

    def assert_holds(self, layer, keys, values, text):
        for held, expected in zip((keys, values), states_of(text, layer), strict=True):
            held = held[:, : len(text)].transpose(0, 1)
            torch.testing.assert_close(held, expected, rtol=0, atol=0, equal_nan=True)


def states_of(numbers, layer):
    """Keys [t, H, 1] and values [t, H, 2]: other numbers for each layer, head and place in them."""
    of_heads = torch.tensor(numbers)[:, None, None] * torch.tensor([[1.0], [0.5]]) * (layer + 1)
    return of_heads, torch.cat([of_heads + 0.25, of_heads + 0.125], dim=-1)


def test_the_cache_holds_what_plain_lists_hold():
    """Opened, closed, appended to (ragged), truncated and refused in any order."""
    run_state_machine_as_test(
        CacheAgainstLists, settings=settings(max_examples=100, stateful_step_count=20)
    )


# ----------------------------------------------------------------------------------------- n-gram


def looked_up(tokens, smallest, largest, limit):
    """Try every suffix, longest first, at every earlier place, latest first."""
    for size in range(largest, smallest - 1, -1):
        for begin in range(len(tokens) - size - 1, -1, -1):
            if tokens[begin : begin + size] == tokens[-size:]:
                grown = list(tokens)
                while len(grown) < len(tokens) + limit:
                    grown.append(grown[begin + size + len(grown) - len(tokens)])
                return grown[len(tokens) :]
    return []


@st.composite
def growing_texts(draw):
    """A prompt, then what each cycle adds: some drafts that were accepted, and one token."""
    alphabet = st.integers(0, draw(st.integers(0, 3)))
    cycles = st.lists(st.lists(alphabet, min_size=1, max_size=5), max_size=12)
    return draw(st.lists(alphabet, min_size=1, max_size=12)), draw(cycles)


@given(growing_texts(), st.integers(1, 4), st.integers(0, 4), st.data())
@settings(max_examples=300)
def test_prompt_lookup_proposes_what_a_search_by_brute_force_finds(text, smallest, more, data):
    prompt, cycles = text
    drafter = NgramDrafter(prompt_lookup_max=smallest + more, prompt_lookup_min=smallest)
    state, tokens = drafter.open(prompt, core.Sampling(), NOISE), list(prompt)
    for new in [[], *cycles]:
        if new:
            drafted = data.draw(st.integers(len(new) - 1, 8))  # what was refused leaves no trace
            drafter.observe(state, messages.Verdict(drafted, len(new) - 1, new))
            tokens += new
        limit = data.draw(st.integers(0, 8))
        expected = looked_up(tokens, smallest, smallest + more, limit)
        draft = drafter.propose(state, limit)
        assert draft.tokens == expected and draft.probs is None
        assert drafter.guess(state, "ngram", limit) == expected
