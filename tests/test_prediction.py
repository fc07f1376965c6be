"""A request's prediction: the text stays the same, comes in fewer passes, and usage tells how much.

The drafter follows the prediction, finds its place again behind a difference, and has no part in
requests without a prediction. What is none is refused: see bad_requests.txt.
"""

import random
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import GREEDY, asked, module_client, run
from started import GENERATE, ROUTES, text_of

from drafters.auto import Controller
from drafters.prediction import Expected, PredictionDrafter, count_verified
from runtime.models import prompts as reading
from runtime.values import MAX_SPECULATIVE_TOKENS, Draft, Request
from server import core
from server.options import MOST_K
from server.prediction import expecting as read
from server.prediction import prediction_ids

client = module_client(max_tokens=20)
NAMES = "prediction", "auto", "tree"


def test_an_exact_prediction_is_drafted_at_full_length(demo_engine, prompts, plain):
    """Each pass gives 16 accepted tokens and a bonus, once the first token is there."""
    prompt = prompts["code_class"]
    text = plain(prompt, 1 + 3 * 17)
    fields = {"drafter": "prediction", "num_speculative_tokens": 16, "max_tokens": len(text)}
    s, events = run(demo_engine, prompt, prediction=(*text,), **fields)
    assert len(text) == 1 + 3 * 17 and s.statistics.target_passes == 3
    assert [len(event["proposals"]) for event in events] == [0, 16, 16, 16]
    assert s.drafting.predicted == {"accepted": 48, "rejected": 0}


def test_auto_takes_the_prediction_where_it_is_best(demo_engine, prompts, plain):
    """By costs as they are expected before any is measured: no clock has a say."""
    prompt, length = prompts["hard_prose"], 100
    text = plain(prompt, length)
    different = [*text[:10], 5, *text[12:25], 5, 6, 7, *text[25:40], *text[44:]]
    for prediction, least in ((text, 0.85), (different, 0.5)):
        controller = Controller.of(demo_engine.target, demo_engine.pool.drafters)
        controller.costs.observe_pass = lambda *_: None
        given = demo_engine.target, demo_engine.pool.drafters, "auto"
        engine = core.Engine(*given, controller=controller)
        engine.planner.record_cycle = lambda *_: None  # so that it chooses in every cycle
        fields = {"drafter": "auto", "num_speculative_tokens": 16, "max_tokens": length}
        s, events = run(engine, prompt, prediction=(*prediction,), **fields)
        assert s.output == text and s.drafting.predicted["accepted"] >= least * len(text)
        if prediction == text:
            assert max(len(event["proposals"]) for event in events) == 16


@pytest.mark.parametrize("name", [*NAMES, "ngram", None])
def test_others_have_no_part_in_it(demo_engine, monkeypatch, prompts, name):
    """Without a prediction, or with another drafter, no state is opened: nobody asks or counts."""
    opened, drafter = [], demo_engine.pool.drafters["prediction"]
    monkeypatch.setattr(drafter, "open", lambda *_: opened.append(1) or Expected(), raising=False)
    fields = {"drafter": name, "max_tokens": 12}
    s, events = run(demo_engine, prompts["easy_facts"], **fields)
    assert not opened and not s.drafting.predicted
    assert "prediction" not in {event.get("drafter") for event in events}
    s, _ = run(demo_engine, prompts["easy_facts"], prediction=(5, 6), **fields)
    assert len(opened) == (name in NAMES)


# ------------------------------------------------------------------------------ finding the place


def expecting(prediction, output=()):
    state = Expected()
    state.take(prediction)
    state.extend(output)
    return state


def test_it_is_found_again_behind_any_edit_within_two_tokens():
    """Where each token occurs once; the edit deletes, inserts or replaces a piece."""
    chance = random.Random(7)
    for _ in range(100):
        old = chance.sample(range(1000), 60)
        begin = chance.randrange(1, 40)
        end = begin + chance.choice([0, 1, 9])
        new = chance.sample(range(1000, 2000), chance.choice([0, 1, 7]))
        text = [*old[:begin], *new, *old[end:]]
        state, place = expecting(old), begin + len(new)
        for at, token in enumerate(text):
            state.extend([token])
            if at < begin - 1 or at >= place:
                assert state.continuation(99) == text[at + 1 : at + 1 + 99] or at < begin
                assert state.continuation(1) == old[old.index(token) + 1 :][:1]
            elif at >= begin:
                assert state.continuation(9) == [] and state.matched == 0


@pytest.mark.parametrize(("prediction", "output", "found", "matched"), [
    ([1, 2, 3, 4], [], [1, 2], 0),  # it may begin at once
    ([1, 2, 3, 4], [1, 2], [3, 4], 2),
    ([1, 2, 3, 4], [9], [], 0),  # nothing of it has come
    ([1, 2, 3, 4], [9, 2], [3, 4], 1),
    ([1, 2, 3, 4], [1, 2, 3, 4], [], 4),  # all of it has
    ([1, 2, 3, 4, 5, 1, 6], [1, 2, 3, 4, 1], [6], 1),  # the place behind goes first
    ([1, 2, 3, 4, 5, 1, 6], [1, 2, 3, 4, 5, 1, 6, 2], [3, 4], 1),  # then one before
    ([7, 5, 8, 6, 5, 9], [6, 5], [9], 2),  # a longer match goes first
    ([7, 5, 8, 7, 5, 9], [7, 5], [8, 7], 2),  # of equally long ones the first
    ([1, 2, 3, 4, 5, 6, 7, 3, 8], [1, 2, 9, 7, 3, 9, 3], [4, 5], 1),  # 2 tokens: no belief
], ids=str)  # fmt: skip
def test_the_longest_match_wins_and_then_the_next_place(prediction, output, found, matched):
    state = expecting(prediction, output)
    assert (state.continuation(2), state.matched) == (found, matched)


def test_a_token_takes_as_long_in_a_long_prediction():
    """Places are searched by halves, and never listed."""
    state = expecting([1, 2] * 5000)
    looked, ends = [], state._ends

    class Places(list):
        def __getitem__(self, i):
            looked.append(i)
            return super().__getitem__(i)

    state._ends = {ngram: Places(places) for ngram, places in ends.items()}
    state.extend([1, 3, 2, 3, 1])
    assert 0 < len(looked) < 100


def test_it_proposes_what_it_was_given_alone():
    drafter = PredictionDrafter()
    state = drafter.open([5, 6, 7], GREEDY, None)
    assert drafter.propose(state, 4).tokens == drafter.guess(state, 4) == []
    state.take([5, 6, 7])
    for forced, draft in (((), [5, 6]), ((5,), [5, 6]), ((5, 6, 9), [5, 6]), ((6,), [])):
        state.forced = forced  # by a grammar: elsewhere a draft could not be accepted
        assert drafter.propose(state, 2).tokens == drafter.guess(state, 2) == draft


# ------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize(("chain", "tree", "came", "counts"), [
    ([5, 6, 7], Draft([5, 6, 7]), [5, 8], (3, 1)),
    ([5, 6, 7], Draft([5, 6, 7]), [5, 6, 7, 8], (3, 3)),
    ([5, 6, 7], Draft([5, 6, 7]), [8], (3, 0)),
    ([5, 6, 7], Draft([5, 6, 7]), [5, 6], (2, 2)),  # the text ended there
    ([5, 6, 7], Draft([5, 6, 5, 8], parents=[-1, 0, -1, 2]), [5, 8], (2, 1)),
    ([5, 6, 7], Draft([4, 5], parents=[-1, -1]), [4, 9], (1, 0)),
    ([5, 6], Draft([4]), [4, 6], (0, 0)),
], ids=["some", "all", "none", "end of text", "branch", "other branch", "absent"])  # fmt: skip
def test_the_fate_of_a_chain_is_counted_as_far_as_it_was_verified(chain, tree, came, counts):
    assert count_verified(chain, tree, came) == counts


@pytest.mark.parametrize("drafter", [None, "auto", "prediction"])
@pytest.mark.parametrize("route", ROUTES)
def test_usage_tells_what_became_of_a_prediction(client, route, drafter):
    """As OpenAI documents it; only where there was one, in an answer and in a stream."""
    plain = asked(client, route, drafter="none")[1]
    text, named = text_of(plain), {"drafter": drafter} if drafter else {}
    empty = asked(client, route, prediction="")[1]
    for body in (plain, empty):
        assert text_of(body) == text and "completion_tokens_details" not in body["usage"]
    unused = asked(client, route, prediction="x", drafter="none")[1]
    assert unused["warnings"] == ["prediction was not used: the drafter is none"]
    assert {*unused["usage"]["completion_tokens_details"].values()} == {0}
    parts = [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:]}]
    for content in (text, parts):
        fields = {"prediction": {"type": "content", "content": content}, "fixed_k": True} | named
        body = asked(client, route, **fields)[1]
        details = body["usage"]["completion_tokens_details"]
        speculation = body["metrics"]["speculative_decoding"]
        num_accepted = speculation["num_accepted_draft_tokens"]
        num_rejected = speculation["num_draft_tokens"] - num_accepted
        assert text_of(body) == text and body["warnings"] == [] and num_accepted > 0
        assert [*details] == ["accepted_prediction_tokens", "rejected_prediction_tokens"]
        assert [*details.values()] == [num_accepted, num_rejected]
    fields |= {"stream": True}
    fields |= {} if route == GENERATE else {"stream_options": {"include_usage": True}}
    for n in (1, 2):  # of several choices the sum
        *_, last = asked(client, route, **fields, n=n)[1]
        told = {name: n * count for name, count in details.items()}
        assert last["usage"]["completion_tokens_details"] == told


def test_a_prediction_is_drafted_at_the_largest_k_unless_the_request_says_another(client):
    for fields, k in (({"prediction": "y"}, MAX_SPECULATIVE_TOKENS), ({}, MOST_K)):
        body = asked(client, GENERATE, **fields)[1]
        assert body["metrics"]["speculative_decoding"]["num_spec_tokens"] == k
    body = asked(client, GENERATE, prediction="y", num_speculative_tokens=3)[1]
    assert body["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3


def test_its_ids_are_those_of_the_text_alone(demo_engine, monkeypatch):
    """Without special tokens; a long one waits for its turn, as long prompts do."""
    tokenizer, sizes = demo_engine.target.tokenizer, []

    def ids(text, add_special_tokens=True, **_):  # of one that begins texts with a special token
        return {"input_ids": [0] * add_special_tokens + tokenizer(text)["input_ids"]}

    marking = Mock(side_effect=ids, get_vocab=tokenizer.get_vocab)
    take = reading.long_texts.take
    monkeypatch.setattr(reading.long_texts, "take", lambda size: sizes.append(size) or take(size))
    for text in ("def f(x):", "x" * 30_000):
        assert prediction_ids(text, marking, 1 << 20) == (*tokenizer(text)["input_ids"],)
    assert sizes == [9, 30_000]


def test_a_prediction_with_tokens_that_the_model_lacks_is_not_read(demo_engine):
    target = SimpleNamespace(
        tokenizer=demo_engine.target.tokenizer,
        max_length=100,
        vocab_size=demo_engine.target.vocab_size,
    )
    request = Request([5], drafter="auto")
    assert read(request, {"prediction": "a b"}, target)[0].prediction
    target.vocab_size = 1
    assert read(request, {"prediction": "a b"}, target)[0].prediction == ()
