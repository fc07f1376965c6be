"""A trace tells what a grammar forbade and what it forced, where each token was chosen.

The reference replays the answer's tokens in llguidance itself, and takes the likeliest tokens from
the answer's log-probabilities, which are those before every transform.
"""

import json
import math

import pytest
from server import ROOT, module_server
from transformers import AutoTokenizer

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "tags": {"type": "array"}},
    "required": ["colour", "tags"],
    "additionalProperties": False,
}
PLAIN = {"prompt": "red, green, blue,", "json_schema": SCHEMA, "max_tokens": 24, "drafter": "none"}
server = module_server("--fixed-k")


def masks(token_ids):
    """Before each token, whether each of the vocabulary is allowed."""
    from llguidance import LLMatcher, hf

    vocabulary = hf.from_tokenizer(AutoTokenizer.from_pretrained(ROOT / "demo_models" / "target"))
    compact = {"whitespace_flexible": False}
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_json_schema(SCHEMA, compact))
    for token in token_ids:
        yield [value > 0 for value in matcher.compute_logit_bias()]
        assert matcher.consume_token(token)


def places(answer):
    return [place for cycle in answer["trace"] for place in cycle["grammar"]]


@pytest.mark.parametrize("more", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_a_trace_tells_what_the_grammar_allows_forces_and_forbids(server, more):
    answer = server.generate(**PLAIN, **more, trace=True, logprobs=20)[1]
    told, ids = places(answer), answer["token_ids"]
    assert len(told) == len(ids) > 10
    texts = {}
    for cycle in answer["trace"]:
        texts |= cycle["texts"]
    for place, allowed, chosen in zip(told, masks(ids), answer["logprobs"], strict=True):
        best = chosen["top_logprobs"]
        barred = [entry for entry in best if not allowed[entry["id"]]][:3]
        assert (place["allowed"], place["vocabulary"]) == (sum(allowed), len(allowed))
        assert place["forced"] == (sum(allowed) == 1)
        assert place["overruled"] == (not allowed[best[0]["id"]])
        shown = place["forbidden"]
        assert len(shown) == min(3, len(allowed) - sum(allowed))
        assert [entry["id"] for entry in shown][: len(barred)] == [one["id"] for one in barred]
        for entry, one in zip(shown, barred, strict=False):
            assert math.isclose(entry["p"], math.exp(one["logprob"]), rel_tol=1e-4)
            assert texts[str(entry["id"])] == one["token"]
    assert any(place["forced"] for place in told) and any(place["overruled"] for place in told)


@pytest.mark.parametrize("drafter", ["grammar", "ngram", "auto", "tree"])
def test_what_the_grammar_said_does_not_depend_on_drafts(server, drafter):
    """The rows of drafted tokens have masks of their own, and a trace shows those of the text."""
    plain = server.generate(**PLAIN, trace=True)[1]
    drafted = server.generate(**PLAIN | {"drafter": drafter}, trace=True)[1]
    assert len(drafted["trace"]) < len(plain["trace"])
    short = [[{**p, "forbidden": [f["id"] for f in p["forbidden"]]} for p in places(a)]
             for a in (plain, drafted)]  # fmt: skip
    assert short[0] == short[1]


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_a_trace_has_no_number_that_json_does_not_know(server, verification):
    """A browser refuses -Infinity, which is the score of a forbidden token."""
    fields = PLAIN | {"drafter": "draft_model", "temperature": 0.8, "seed": 1, "trace": True}
    data = server.call("POST", "/generate", fields | {"verification": verification})[2]
    trace = json.loads(data, parse_constant=pytest.fail)["trace"]
    entries = [one for cycle in trace for place in cycle["distributions"] for one in place]
    assert any(one["p"] == 0 for one in entries if one["score"] is None)
    assert all(one["p"] == 0 for one in entries if one["score"] is None)


def test_a_text_without_a_grammar_has_none_in_its_trace(server):
    answer = server.generate(prompt="x = [", max_tokens=3, trace=True)[1]
    assert [cycle["grammar"] for cycle in answer["trace"]] == [None] * len(answer["trace"])
