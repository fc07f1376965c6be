"""A trace tells what a grammar forbade and what it forced, where each token was chosen.

The reference replays the text's tokens in llguidance itself, and takes the likeliest tokens from
the log-probabilities, which are those before every transform.
"""

import json
import math

import pytest
from conftest import closed, run

from runtime.values import Sampling
from server.formats import grammar_of

SCHEMA = closed(colour={"enum": ["red", "blue"]}, tags={"type": "array"})
SAMPLED = Sampling(temperature=0.8)
REJECTION = Sampling(temperature=0.8, verification="rejection")


def traced(engine, drafter, sampling, **more):
    """The sequence and the trace of a text that obeys SCHEMA."""
    if drafter == "tree" and drafter not in engine.pool.choices:
        pytest.skip("no compiled blocks here")
    prompt = engine.target.tokenizer("red, green, blue,")["input_ids"]
    grammar = grammar_of({"json_schema": SCHEMA}, engine, prompt)
    fields = {"sampling": sampling, "seed": 3, "max_tokens": 24, "grammar": grammar} | more
    return run(engine, prompt, drafter=drafter, trace=True, **fields)


def masks(tokenizer, token_ids):
    """Before each token, whether each of the vocabulary is allowed."""
    from llguidance import LLMatcher, hf

    compact = {"whitespace_flexible": False}
    source = LLMatcher.grammar_from_json_schema(SCHEMA, compact)
    matcher = LLMatcher(hf.from_tokenizer(tokenizer), source)
    for token in token_ids:
        yield [value > 0 for value in matcher.compute_logit_bias()]
        assert matcher.consume_token(token)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, REJECTION], ids=str)
@pytest.mark.parametrize("drafter", [None, "auto", "draft_model", "tree"])
def test_a_trace_tells_what_the_grammar_allows_forces_and_forbids(demo_engine, drafter, sampling):
    """Whoever drafts: the rows of drafted tokens have masks of their own, which are not shown."""
    sequence, events = traced(demo_engine, drafter, sampling, logprobs=20)
    assert drafter is None or len(events) < len(sequence.output)
    told = [place for event in events for place in event["grammar"]]
    ids, texts = sequence.output, {}
    assert len(told) == len(ids) > 10
    for event in events:
        texts |= event["texts"]
    allowed_at = masks(sequence.tokenizer, ids)
    for place, allowed, chosen in zip(told, allowed_at, sequence.logprobs, strict=True):
        best = chosen["top_logprobs"]
        barred = [entry for entry in best if not allowed[entry["id"]]][:3]
        assert (place["allowed"], place["vocabulary"]) == (sum(allowed), len(allowed))
        assert place["forced"] == (sum(allowed) == 1)
        assert place["overruled"] == (not allowed[best[0]["id"]])
        shown = place["forbidden"]
        assert len(shown) == min(3, len(allowed) - sum(allowed))
        for entry, one in zip(shown, barred, strict=False):
            assert entry["id"] == one["id"] and texts[entry["id"]] == one["token"]
            assert math.isclose(entry["p"], math.exp(one["logprob"]), rel_tol=1e-4)
    assert any(place["forced"] for place in told) and any(place["overruled"] for place in told)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, REJECTION], ids=str)
def test_a_trace_has_no_number_that_json_does_not_know(demo_engine, sampling):
    """A browser refuses -Infinity, which is the score of a forbidden token."""
    _, events = traced(demo_engine, "draft_model", sampling)
    json.dumps(events, allow_nan=False)
    entries = [one for event in events for place in event["distributions"] for one in place]
    forbidden = [one["p"] for one in entries if one["score"] is None]
    assert {*forbidden} <= {0} and (forbidden or sampling.is_greedy)


def test_a_text_without_a_grammar_has_none_in_its_trace(demo_engine):
    _, events = traced(demo_engine, "ngram", Sampling(), grammar=None)
    assert {event["grammar"] for event in events} == {None}
