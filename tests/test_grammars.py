"""Constrained text is that of constrained plain decoding, token for token, whoever drafts for it.

Plain decoding is written here: one forward a token, a matcher of llguidance's that is told each
token, and a choice among what it allows. So a text parses, unless it is cut. What a
grammar forbids is cut from drafts, and what it forces is a draft. A trace tells both. Requests over
HTTP are in test_formats.py.
"""

import json
import math
import random
import re
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path

import conftest
import llguidance.hf
import pytest
import torch
from conftest import WAYS, decoded_by, finish, grammar_of, run, scripted_engine, together
from llguidance import LLMatcher

from runtime import grammars
from runtime.cache.prefix import PrefixCache
from runtime.grammars.measure import CHOICE, JSON, LARK, REGEX, USUAL
from runtime.values import Draft, Request
from server import core
from server.events import event
from tools.lossless import compare, first_tokens

SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text("utf-8"))
DRAFTERS = ("ngram", "suffix", "grammar", "draft_model", "mtp", "auto", "tree")
PERSON, COUNT = SCHEMAS["person"], 64
LIST = 'start: item (", " item)*\nitem: /[a-z]{1,6}/ | NUMBER\nNUMBER: /[0-9]{1,3}/'
CONSTRAINTS = {  # which a text may obey, of each kind
    "schema": (JSON, PERSON),
    "regex": (REGEX, r"( (red|green|blue),){3,6} and [a-z]+\."),
    "rules": (LARK, LIST),
    "choice": (CHOICE, ["red, green, blue", "red, green, yellow", "nothing at all", "{}"]),
}
SOURCES = {
    JSON: lambda value: LLMatcher.grammar_from_json_schema(value, {"whitespace_flexible": False}),
    REGEX: LLMatcher.grammar_from_regex,
    LARK: LLMatcher.grammar_from_lark,
    CHOICE: lambda texts: LLMatcher.grammar_from_regex("|".join(map(re.escape, texts))),
}
ODDS = 1e-6  # of a false alarm, of a test of chance


@cache
def words_of(target):
    """The target's tokens, as llguidance reads them from a tokenizer by itself."""
    eos_ids = sorted(target.eos_ids)
    return llguidance.hf.from_tokenizer(target.tokenizer, target.vocab_size, eos_ids)


def decode(target, prompt, max_tokens, constraint, sampling=conftest.GREEDY, seed=0):
    """Constrained plain decoding: the tokens, up to an end of text or where nothing may follow."""
    kind, value = constraint
    matcher = LLMatcher(words_of(target), SOURCES[kind](value))

    def rule(logits, _):
        allowed = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8)
        return torch.where(allowed > 0, logits, -torch.inf)

    def is_end(token):
        assert matcher.consume_token(token)
        return token in target.eos_ids or matcher.is_stopped()

    return decoded_by(rule, is_end, target, prompt, max_tokens, sampling, seed)


def ids_of(engine, text):
    return engine.target.tokenizer(text)["input_ids"]


def requests_of(engine, prompt, constraint, k=5, max_tokens=COUNT, **way):
    """By drafters that write what is forced, alone and among others, and by one that does not."""
    grammar, names = grammar_of(engine, *constraint), ("grammar", "auto", "mtp")
    return [Request(prompt, max_tokens, name, k, grammar=grammar, **way) for name in names]


@pytest.fixture(scope="module")
def prompt(demo_engine):
    return ids_of(demo_engine, "An answer in JSON, about red, green and blue: ")


@pytest.fixture(scope="module")
def expected(demo_engine):
    """Constrained plain decoding on the demo target, remembered; without a constraint, too."""

    @cache
    def texts(prompt, name, max_tokens, way):
        if name is None:
            return conftest.plain_text(demo_engine, [*prompt], max_tokens, **WAYS[way])
        return decode(demo_engine.target, [*prompt], max_tokens, CONSTRAINTS[name], **WAYS[way])

    return lambda prompt, name, max_tokens, way: texts((*prompt,), name, max_tokens, way)


def mixed(engine, prompts, k, way):
    """Requests of all constraints, and some without, by all drafters in turns."""
    names = [name for name in DRAFTERS if name in engine.pool.choices]
    kinds = [*CONSTRAINTS, None, None, *CONSTRAINTS][k % 4 :][:7]
    for i, name in enumerate(kinds):
        grammar = name and grammar_of(engine, *CONSTRAINTS[name])
        drafter, prompt = names[(i + k) % len(names)], prompts[i % len(prompts)]
        yield name, Request(prompt, 24 + i, drafter, k, grammar=grammar, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("k", [5, 8])
def test_texts_of_any_grammars_run_beside_free_ones(demo_engine, prompts, expected, k, way):
    """Long prompts come in chunks, and some begin in the prefix cache."""
    some = [prompts["easy_json"] * 3, prompts["hard_prose"], prompts["easy_json"] * 3 + [5, 6]]
    target, known = demo_engine.target, PrefixCache.of(demo_engine.target, 64)
    engine = core.Engine(target, demo_engine.pool.drafters, prefixes=known, prefill_chunk=24)
    for _ in range(2 if k == 5 else 1):  # then all are in the cache
        names, requests = zip(*mixed(engine, some, k, way), strict=True)
        for name, s in zip(names, together(engine, [*requests]), strict=True):
            assert s.output == expected(s.request.prompt, name, s.request.max_tokens, way)
            assert not s.warnings and s.failure is None
    assert k != 5 or known.as_dict()["hit_tokens"] > 200


SOME, OTHERS = [*SCHEMAS][::4], [*SCHEMAS][2::4]
CASES = [
    (SOME, "greedy", 5),
    (OTHERS, "sampled", 8),
    pytest.param(SCHEMAS, "greedy", 5, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("names", "way", "k"), CASES, ids=["some", "others", "all"])
def test_a_text_of_any_schema_is_that_of_plain_decoding(demo_engine, prompt, names, way, k):
    """OpenAPI's parts, package.json, GeoJSON, arguments of tools, invoices and others.

    A text that is whole parses, and what is forced saves passes. That a text obeys its schema is
    llguidance's to know.
    """
    assert len(SCHEMAS) == 40
    num_whole = num_forced = 0
    for schema in map(SCHEMAS.get, names):
        requests = requests_of(demo_engine, prompt, (JSON, schema), k, 48, **WAYS[way])
        requests.append(replace(requests[0], drafter=None))
        sequences = together(demo_engine, requests)
        truth = decode(demo_engine.target, prompt, 48, (JSON, schema), **WAYS[way])
        assert all(s.output == truth and not s.warnings for s in sequences), schema
        num_forced += sequences[0].statistics.num_accepted_draft_tokens
        if all(s.finish_reason == "stop" or s.matcher.may_end for s in sequences):
            json.loads(sequences[0].text.text)
            num_whole += 1
    assert num_whole > len(names) / 2 and num_forced > 3 * len(names)


# ------------------------------------------------------------------- what becomes of drafts


def tokens_of(engine, text):
    return [token for character in text for token in ids_of(engine, character)]


def test_a_draft_is_cut_before_what_the_grammar_forbids(demo_engine):
    """Of a drawn one the first forbidden token stays: to be drawn and dropped is no chance."""
    matcher = grammar_of(demo_engine, REGEX, "a(b[cd]|cd*)e").matcher()
    tokens = tokens_of(demo_engine, "abcxe")
    probs = torch.eye(5)
    draft = matcher.cut(Draft(tokens, probs, None, [0.5, 0.4, 0.3, 0.2, 0.1]))
    assert (draft.tokens, draft.confidence) == (tokens[:3], [0.5, 0.4, 0.3])
    assert torch.equal(draft.probs, probs[:3])
    assert matcher.cut(Draft(tokens, probs), is_drawn=True).tokens == tokens[:4]
    assert matcher.cut(Draft(tokens[:3])).tokens == tokens[:3]
    whole, eos = tokens_of(demo_engine, "abce"), min(demo_engine.eos_ids)
    assert matcher.cut(Draft([*whole, tokens[0]])).tokens == whole  # nothing may follow
    assert matcher.cut(Draft([*whole, eos, eos])).tokens[:5] == [*whole, eos]
    assert not matcher._grammar.is_heavy  # nothing was too much for it


def test_branches_are_cut_where_they_break_the_grammar(demo_engine):
    """a-b-c, a-x-e, z-b and a-c-d."""
    matcher = grammar_of(demo_engine, REGEX, "a(b[cd]|cd*)e").matcher()
    tokens = tokens_of(demo_engine, "azbxbcecd")
    sure = [i / 10 for i in range(9)]
    draft = matcher.cut(Draft(tokens, None, [-1, -1, 0, 0, 1, 2, 3, 0, 7], sure))
    assert draft.tokens == tokens_of(demo_engine, "abccd")
    assert (draft.parents, draft.confidence) == ([-1, 0, 1, 0, 3], [0.0, 0.2, 0.5, 0.7, 0.8])
    assert matcher.cut(draft) is draft


def test_a_tree_has_a_mask_for_each_of_its_tokens(demo_engine):
    """The one that stands behind the path to it, and not behind the token before."""
    matcher = grammar_of(demo_engine, REGEX, "a(b[cd]|c[de]*)e").matcher()
    a, b, c, d, e = tokens_of(demo_engine, "abcde")
    tree = Draft([a, b, c, c, d, e], None, [-1, 0, 1, 0, 3, 2])
    scores = matcher.mask(torch.zeros(7, demo_engine.target.vocab_size), tree)
    allowed = [{x for x in (a, b, c, d, e) if row[x] == 0} for row in scores]
    assert allowed == [{a}, {b, c}, {c, d}, {e}, {d, e}, {d, e}, set()]
    assert not any(map(matcher.consume, (a, b, c))) and not matcher.may_end
    assert matcher.consume(e) and matcher.may_end
    assert not matcher.consume(a) and matcher.forced(9) == []
    with pytest.raises(ValueError, match="the grammar cannot go on"):
        matcher.mask(torch.zeros(1, demo_engine.target.vocab_size), Draft())


def test_what_is_forced_is_proposed_as_the_tokenizer_writes_it(demo_engine):
    text = ' {"colour":"blue","size":12'
    matcher = grammar_of(demo_engine, REGEX, re.escape(text) + "[0-9]").matcher()
    tokens = ids_of(demo_engine, text)
    assert matcher.forced(99) == tokens and matcher.forced(3) == tokens[:3]
    largest = max(tokens)
    with pytest.MonkeyPatch.context() as patch:  # a model may have fewer tokens
        patch.setattr(matcher._vocabulary, "size", largest)
        assert matcher.forced(99) == tokens[: tokens.index(largest)]
    for token in tokens:
        matcher.consume(token)
    assert matcher.forced(99) == []


def test_a_draft_that_the_grammar_has_made_is_shown_and_counted_as_its_own(demo_engine):
    """A head is not asked where tokens are forced: it drafts behind the target's states."""
    mtp, asked, makers = demo_engine.pool.drafters["mtp"], list[bool](), set()
    request = Request(ids_of(demo_engine, "x = "), 40, "auto", 5, trace=True, fixed_k=True)
    grammar = grammar_of(demo_engine, JSON, TRACED)
    s = demo_engine.open(replace(request, grammar=grammar))
    states = s.drafting.states
    s.drafting.states = {"mtp": states.pop("mtp")} | states  # it is first
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mtp, "propose_batch", lambda *given: asked.append(True) or heads(*given))
        heads = type(mtp).propose_batch.__get__(mtp)
        while not s.finish_reason:
            for cycle in demo_engine.step([s]).values():  # none while the grammar is late
                if cycle.num_drafted:
                    makers.add((event(s, cycle)["drafter"], bool(asked)))
                asked.clear()
    demo_engine.close(s)
    assert makers == {("mtp", True), ("grammar", False)}


def test_forbidden_proposals_cost_no_row_and_are_heard_of(demo_engine, prompt, expected):
    """Two right tokens, and nonsense: what was verified is right, and so is what is observed."""
    truth = expected(prompt, "regex", COUNT, "greedy")

    def script(tokens, limit):
        return [*truth[len(tokens) - len(prompt) :][:2], *ids_of(demo_engine, "{[(")][:limit]

    engine = scripted_engine(demo_engine, script)
    grammar = grammar_of(engine, *CONSTRAINTS["regex"])
    s, events = run(engine, prompt, max_tokens=COUNT, drafter="scripted", grammar=grammar)
    assert s.output == truth
    assert [len(event["proposals"]) for event in events[1:-1]] == [2] * (len(events) - 2)
    assert s.statistics.draft_acceptance_rate == 1
    first, *verdicts = engine.pool.drafters["scripted"].verdicts
    assert len(verdicts) >= len(events) - 2
    for verdict in verdicts:
        assert (verdict.drafted, verdict.accepted, len(verdict.tokens)) == (5, 2, 3)


@pytest.mark.parametrize("drafter", ["draft_model", "mtp", "ngram", "suffix"])
def test_a_drafter_whose_draft_was_cut_goes_on_like_a_fresh_one(
    demo_engine, prompt, drafter, monkeypatch
):
    """By itself, and behind what is forced, with which its draft then begins.

    Drafts are made in Python here; for those of C see test_kernels.py.
    """
    monkeypatch.setattr("runtime.kernels.can_chain", lambda *_: False)
    some, constraint = demo_engine.pool.drafters, (JSON, PERSON)
    pair = core.Engine(demo_engine.target, {name: some[name] for name in (drafter, "grammar")})
    expected, grammar = (
        decode(pair.target, prompt, COUNT, constraint),
        grammar_of(pair, *constraint),
    )
    for name in (drafter, "auto"):
        s, _ = conftest.run_beside_fresh(pair, Request(prompt, COUNT, name, 5, grammar=grammar))
        assert s.output == expected and not s.warnings


# ------------------------------------------------------------------- the rule of rejection


def rash(engine):
    """A drafter that draws from a q of its own, half of which is forbidden."""
    ids = [i for text in (" C", " A", " B") for i in ids_of(engine, text)]
    chances, chance = (0.5, 0.4, 0.1), random.Random(0)
    q = torch.zeros(engine.target.vocab_size)
    q[ids] = torch.tensor(chances)
    return conftest.ScriptedDrafter(
        lambda _, limit: chance.choices(ids, chances, k=limit), lambda _, k: q.expand(k, -1)
    )


@pytest.mark.parametrize("drafter", ["rash", pytest.param("draft_model", marks=pytest.mark.slow)])
def test_rejection_keeps_the_distribution_of_constrained_sampling(many, drafter):
    """What all expect, " C", is forbidden, and drawn. Three views: odds of a false alarm 3e-6."""
    engine = core.Engine(many.target, many.pool.drafters | {"rash": rash(many)})
    grammar, sampling = grammar_of(many, REGEX, "( A| B)*"), core.Sampling(temperature=1.0)
    text, fields = ids_of(many, "A B C A B"), {"grammar": grammar, "sampling": sampling}
    plain = Request(text, 12, None, 3, seed=7, **fields)
    rejection = replace(sampling, verification="rejection")
    drafted = replace(plain, drafter=drafter, sampling=rejection, seed=10**7)
    tests = compare(*(first_tokens(engine, request, 512) for request in (drafted, plain)))
    assert min(test.p_value for test in tests.values()) > ODDS


# ------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("method", ["mask", "consume", "cut", "forced"])
def test_a_faulty_matcher_ends_one_text_alone(demo_engine, prompts, expected, monkeypatch, method):
    """Amid the text; the others of the batch go on. Where it fails to draft, no text ends."""
    some = mixed(demo_engine, [prompts["easy_json"]], 5, "greedy")
    names, requests = zip(*some, strict=True)
    sequences = [demo_engine.open(replace(request, drafter="auto")) for request in requests]
    broken = sequences[names.index("schema")]
    inner, failed = getattr(broken.matcher, method), []

    def amid(*given):
        if len(broken.output) > 4:
            failed.append(method)
            raise ValueError("the grammar cannot go on: too many states")
        return inner(*given)

    monkeypatch.setattr(broken.matcher, method, amid)
    finish(demo_engine, sequences)
    assert failed
    for name, s in zip(names, sequences, strict=True):
        text = expected(s.request.prompt, name, s.request.max_tokens, "greedy")
        if s is broken and method != "forced":
            assert s.finish_reason == "error" and "too many states" in str(s.failure)
            assert 4 < len(s.output) < len(text) and s.output == text[: len(s.output)]
        else:
            assert s.output == text and s.failure is None
            assert s is broken or not s.warnings


def test_a_text_whose_grammar_is_slow_sits_out_and_others_go_on(
    demo_engine, prompt, expected, monkeypatch
):
    """So do texts of the same grammar, as they share its states. Then each goes on as ever."""
    known = grammar_of(demo_engine, *CONSTRAINTS["schema"])
    fresh = grammars.Grammar(known.source, USUAL, known.vocabulary)  # which was never slow
    names = ["schema", "schema", "regex", None]
    each = [fresh, fresh, grammar_of(demo_engine, *CONSTRAINTS["regex"]), None]
    requests = [Request(prompt, 24, "auto", grammar=grammar) for grammar in each]
    slow, second, *others = sequences = [demo_engine.open(request) for request in requests]
    walk, may_go, before = slow.matcher._walk, threading.Event(), demo_engine.pool.num_late
    inner, waits = grammars.wait, []

    def walk_late(*given):
        assert may_go.wait(60)
        return walk(*given)

    def wait(masks, timeout):
        assert timeout < 1
        if slow.matcher._explored in masks:
            assert not waits  # no pass waits again: the other one's masks are there from now on
            waits.append(masks)
            inner([second.matcher._explored], 60)
        return inner(masks, timeout)

    slow.matcher._walk = walk_late
    monkeypatch.setattr(grammars, "wait", wait)
    try:
        while going := [s for s in sequences if not s.finish_reason and s in others]:
            demo_engine.step([slow, second, *going])
    finally:
        may_go.set()
        monkeypatch.undo()
    assert not slow.output and not second.output and demo_engine.pool.num_late > before
    assert len(waits) == 1
    finish(demo_engine, sequences)
    for name, s in zip(names, sequences, strict=True):
        assert s.output == expected(prompt, name, 24, "greedy") and not s.warnings


NESTED = REGEX, "((a{1,99}){1,99}){1,99}"  # about thirty tokens of it need all states that may be
EITHER = r"""start: / [a-z ,]{30,60}\./ | "{" T
T: /((((a{1,99}){1,99}){1,99}){1,99})/
"""


def test_a_grammar_that_grows_too_large_ends_each_text_at_the_same_place(demo_engine, prompt):
    """Texts of a grammar share its states: what one has used up is no other's end."""
    some = requests_of(demo_engine, prompt, NESTED, max_tokens=60, **WAYS["sampled"])
    plain, texts = replace(some[0], drafter=None), []
    for request in (plain, *some, plain):
        (s,) = finish(demo_engine, [demo_engine.open(request)])
        assert s.finish_reason == "error" and "the grammar cannot go on" in str(s.failure)
        texts.append(s.output)
    assert texts == [texts[0]] * len(texts) and len(texts[0]) > 9


def test_where_a_token_is_too_much_a_thread_of_the_masks_begins_anew(demo_engine, prompt):
    """To build a grammar again takes up to a second, for which no other text is to wait."""
    bomb = "".join(f"({chr(97 + i % 26) * 3})?" for i in range(5000)) + "q"
    grammar, builders = grammar_of(demo_engine, REGEX, bomb), list[str]()
    request = Request(prompt, 30, "ngram", grammar=grammar, sampling=core.Sampling(1.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammars.Grammar, "build", grammars.Grammar.build)
        conftest.before(
            grammars.Grammar, "build", lambda _: builders.append(threading.current_thread().name)
        )
        (s,) = finish(demo_engine, [demo_engine.open(request)])
    assert s.finish_reason == "error" and "the grammar cannot go on" in str(s.failure)
    assert builders and all(name.startswith("masks") for name in builders)


def test_a_text_whose_last_token_is_too_much_has_ended_all_the_same(demo_engine, prompt):
    request = Request(prompt, 30, "ngram", grammar=grammar_of(demo_engine, REGEX, "[a-f]{5}"))
    (expected,) = finish(demo_engine, [demo_engine.open(request)])
    consume = grammars.Matcher.consume

    def consume_and_lose(matcher, token):
        if has_ended := consume(matcher, token):
            matcher._lost = grammars.CannotGoOn("too much")
        return not has_ended and has_ended

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammars.Matcher, "consume", consume_and_lose)
        (s,) = finish(demo_engine, [demo_engine.open(request)])
    assert (s.output, s.finish_reason) == (expected.output, "stop") and not s.failure
    assert s.text.text == expected.text.text


def test_no_grammar_is_built_again_where_it_fails_for_any_text(demo_engine, prompt, monkeypatch):
    """A row of it may be too wide behind the first character."""
    wide = {"type": ["object", "null"], "properties": {f"p{i}": {} for i in range(1500)}}
    grammar = grammar_of(demo_engine, JSON, wide)
    monkeypatch.delattr(type(grammar), "build")
    bias = core.Sampling(logit_bias=((ids_of(demo_engine, "{")[0], 100.0),))
    with pytest.raises(ValueError, match="Current row has"):
        run(demo_engine, prompt, grammar=grammar, drafter="auto", sampling=bias)


def test_of_a_draft_that_grows_too_large_the_beginning_stays(demo_engine):
    draft = [*ids_of(demo_engine, "{"), *ids_of(demo_engine, "a") * 15]
    matcher = grammar_of(demo_engine, LARK, EITHER).matcher()
    assert 0 < len(matcher.cut(Draft(draft)).tokens) < len(draft)


@pytest.mark.parametrize("who", ["tree", "neighbours"])
def test_however_many_drafts_grow_too_large_the_text_goes_on(demo_engine, prompt, who):
    """Branches of one draft, or drafts of others beside it."""
    signs = [ids[0] for sign in "{[(<=+*|#@~%&^$" if len(ids := ids_of(demo_engine, sign)) == 1]
    any_sign = " | ".join(json.dumps(demo_engine.target.tokenizer.decode([i])) for i in signs)
    rules = EITHER.replace("a{1,99}", "[a-z]{1,99}").replace("start:", 'start: "x" body\nbody:')
    rules = rules.replace("{30,60}", "{150,200}").replace('"{" T', f"({any_sign}) T")
    engine = scripted_engine(demo_engine, None)
    count = len(signs) if who == "tree" else 1
    wide = Draft(signs[:count], None, [-1] * count)
    engine.pool.drafters["scripted"].propose = lambda *_: wide
    grammar = grammar_of(engine, LARK, rules)
    sampling = core.Sampling(logit_bias=tuple((sign, -100.0) for sign in signs))
    fields = {"grammar": grammar, "sampling": sampling, "num_speculative_tokens": 16}
    plain, _ = run(engine, prompt[:-1], max_tokens=80, **fields)
    is_tree = who == "tree"
    s = engine.open(Request(prompt[:-1], 80, "scripted" if is_tree else None, **fields))
    for _ in range(0 if is_tree else 12):
        beside = engine.open(Request(prompt[:-1], 4, "scripted", **fields))
        while not beside.finish_reason:
            engine.step([one for one in (s, beside) if not one.finish_reason])
        engine.close(beside)
    finish(engine, [s])
    assert len(signs) > 9 and plain.failure is None
    assert s.output == plain.output and not s.failure and not s.warnings


# ------------------------------------------------------------------- what a trace tells

TRACED = conftest.closed(colour={"enum": ["red", "blue"]}, tags={"type": "array"})
SAMPLINGS = (
    core.Sampling(),
    *(core.Sampling(temperature=0.8, verification=rule) for rule in ("coupled", "rejection")),
)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize(
    "drafter", [None, "auto", "draft_model", pytest.param("tree", marks=conftest.needs_compiler)]
)
def test_a_trace_tells_what_the_grammar_allows_forces_and_forbids(demo_engine, drafter, sampling):
    """Where each token was chosen, by log-probabilities, which are those before every transform.

    Whoever drafts: the rows of drafted tokens have masks of their own, which are not shown. Nor is
    the score of a forbidden token, -Infinity, which a browser refuses.
    """
    fields = {"max_tokens": 24, "drafter": drafter, "sampling": sampling, "seed": 3}
    fields |= {"trace": True, "logprobs": 20}
    text = ids_of(demo_engine, "red, green, blue,")
    sequence, events = run(
        demo_engine, text, grammar=grammar_of(demo_engine, JSON, TRACED), **fields
    )
    json.dumps(events, allow_nan=False)
    entries = [one for event in events for place in event["distributions"] for one in place]
    forbidden = [one["p"] for one in entries if one["score"] is None]
    assert {*forbidden} <= {0} and (forbidden or sampling.is_greedy or drafter != "draft_model")
    assert drafter is None or len(events) < len(sequence.output)
    told = [place for event in events for place in event["grammar"]]
    texts = {token: text for event in events for token, text in event["texts"].items()}
    assert len(told) == len(sequence.output) > 10
    matcher = LLMatcher(words_of(demo_engine.target), SOURCES[JSON](TRACED))
    for place, token, chosen in zip(told, sequence.output, sequence.logprobs, strict=True):
        allowed = [value > 0 for value in matcher.compute_logit_bias()]
        assert matcher.consume_token(token)
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
    _, events = run(demo_engine, text, trace=True, max_tokens=2)
    assert {event["grammar"] for event in events} == {None}
