"""What a drafter from a file may do to the server: be slow, be wrong, and nothing else.

Whatever it raises, returns or goes on to change, each text is plain decoding's, every row of the KV
cache is free afterwards, and the next request is served. What it makes raises SystemExit here where
it is looked at, which would end the engine's thread.
"""

import itertools
import json
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import WAYS, ScriptedDrafter, assert_lossless, before, run

from drafters import Draft, Drafter
from drafters.auto import Controller
from drafters.ngram import NgramDrafter
from drafters.timed import TimedDrafter
from runtime.values import Request, in_short
from server import core

PROMPT = [5, 6, 7, 8, 5, 6, 7]
REJECTION = core.Sampling(1.0, 1.0, verification="rejection")


def exits(*_, **__):
    raise SystemExit("the drafter")


def loops(*_, **__):
    while True:
        time.sleep(0.001)


def bad(*methods, base=object, act=exits):
    """A class whose methods raise SystemExit."""
    return type("Bad", (base,), dict.fromkeys(methods, act))


def raising(error):
    """A method that raises what `error` makes."""

    def act(*_, **__):
        raise error()

    return act


def drafting(tokens=lambda k: [7] * k, **fields):
    """A `propose` of tokens and fields that are made anew."""
    return lambda self, state, k: Draft(tokens(k), **{n: f(k) for n, f in fields.items()})


def tokens_of(kind):
    return drafting(lambda k: kind([7] * k))


def uniform(k):
    return torch.full((k, 4096), 1 / 4096)


def subclass_of_tensor(k):
    kind = type("Bad", (torch.Tensor,), {"__torch_function__": classmethod(exits)})
    return uniform(k).as_subclass(kind)


class Unnamed(type):
    """A kind of classes that have no name."""

    __name__ = property(exits)


def spoil(self, state, verdict):
    """Change all that was handed over."""
    verdict.tokens.clear()
    verdict.hidden.resize_(0)


def open_and_spoil(self, prompt, sampling, noise):
    noise.seed = 1
    object.__setattr__(sampling, "temperature", 0.1)
    return prompt


endless = bad("__iter__", base=list, act=lambda *_: itertools.repeat(7))
unlike = bad("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__index__", base=int)
state_of = {"open": lambda *_: None, "observe": lambda *_: None}
HOSTILE = {  # what is done -> methods of a drafter
    "an error of no class": {"open": raising(
        type("Bad", (Exception,), {"__class__": property(exits)}))},
    "an error without a traceback": {"propose": raising(
        type("Bad", (Exception,), {"__traceback__": property(exits, lambda *_: None)}))},
    "an error whose words do not end": {"observe": raising(
        bad("__str__", base=Exception, act=loops))},
    "a state that cannot be looked at": state_of | {"open": lambda *_: bad("__getattribute__")()},
    "a state that is gone": state_of | {"open": lambda *_: weakref.proxy(bad()())},
    "a state that is a generator": {"open": lambda *_: (token for token in [7])},
    "tokens that exit": {"propose": tokens_of(bad("__iter__", base=list))},
    "tokens without an end": {"propose": tokens_of(endless)},
    "tokens that do not come": {"propose": tokens_of(bad("__iter__", base=list, act=loops))},
    "numbers that compare with nothing": {"propose": drafting(lambda k: [unlike(7)] * k)},
    "a number without a repr": {"propose": drafting(lambda k: [bad("__repr__")()] * k)},
    "a number of no class": {
        "propose": drafting(lambda k: [Unnamed("Bad", (), {})()] * k)},
    "a draft without tokens": {"propose": lambda *_: object.__new__(
        type("Bad", (Draft,), {"tokens": property(exits)}))},
    "what says it is a draft": {
        "propose": lambda *_: type("Bad", (), {"__class__": Draft, "__getattr__": exits})()},
    "a class without a name": {"propose": lambda *_: Unnamed("Bad", (), {})()},
    "confidence that is no float": {
        "propose": drafting(confidence=lambda k: [bad("__float__", "__le__", "__ge__")()] * k)},
    "parents that exit": {
        "propose": drafting(parents=lambda k: bad("__iter__", "__len__", base=list)([-1] * k))},
    "a number of passes that is none": {
        "propose": drafting(num_forwards=lambda k: bad("__int__", "__index__")())},
    "probabilities with functions of their own": {"propose": drafting(probs=subclass_of_tensor)},
    "drafts that exit": {"propose_batch": lambda *_: bad("__iter__", base=list)([Draft()])},
    "drafts without a length": {"propose_batch": lambda *_: bad("__len__", base=list)([Draft()])},
    "a guess that exits": {"guess": lambda *_: bad("__iter__", base=list)([7])},
    "a guess that is not so": {"guess": lambda *_: bad("__bool__", "__len__", base=list)()},
    "a guess without an end": {"guess": lambda *_: endless()},
    "evidence that is no number": {
        "guess": lambda *_: [7], "evidence": lambda *_: bad("__int__", "__index__")()},
    "no method where one was": {"observe": property(exits)},
    "changes of what it is given": {
        "open": open_and_spoil, "observe": spoil, "needs_hidden": True},
    "a prompt that grows": {"open": lambda self, prompt, *_: prompt},
}  # fmt: skip


def check_plain(_, draft, *__):
    """What the engine is given has no code of the drafter's."""
    numbers = draft.num_forwards, *draft.tokens, *(draft.parents or ())
    assert {type(number) for number in numbers} <= {int} and type(draft) is Draft
    assert {type(chance) for chance in draft.confidence} <= {float}
    assert type(draft.probs) in (type(None), torch.Tensor)


@pytest.mark.parametrize("what", HOSTILE)
def test_whatever_a_drafter_from_a_file_does_costs_its_own_drafts_alone(demo_engine, what):
    methods = {"name": "hostile", "propose": drafting()} | HOSTILE[what]
    limit_s = 0.1 if "do not" in what else 60.0
    drafter = TimedDrafter(type("Hostile", (Drafter,), methods)(), limit_s)
    target, loaded = demo_engine.target, {"hostile": drafter, "ngram": NgramDrafter(4, 1)}
    engine = core.Engine(target, loaded, "hostile", controller=Controller.of(target, loaded))
    before(engine, "accept", check_plain)
    num_free, fields = len(target.cache._free), {"trace": True}
    assert_lossless(engine, PROMPT, 6, "hostile", **fields, fixed_k=True)
    assert_lossless(engine, PROMPT, 8, "auto", **fields)
    assert_lossless(engine, PROMPT, 8, "hostile", **fields, **WAYS["sampled"])
    fields |= {"max_tokens": 6, "fixed_k": True, "sampling": REJECTION}
    sequence, events = run(engine, PROMPT, drafter="hostile", **fields)
    assert len(sequence.output) == 6 and json.dumps([events, sequence.warnings])
    assert not assert_lossless(engine, PROMPT, 4, "ngram", fixed_k=True).warnings
    assert len(target.cache._free) == num_free
    assert engine.pool.failures.keys() <= {"hostile"}


class Choosy(Drafter):
    """Its first prompt's token says whether it fails; no text is asked twice without a verdict."""

    name = "choosy"

    def open(self, prompt, sampling, noise):
        return {"act": {7: raising(ValueError), 8: loops}.get(prompt[0]), "is_judged": True}

    def propose(self, state, max_tokens):
        if state["act"]:
            state["act"]()
        assert state["is_judged"]
        state["is_judged"] = False
        return Draft([5] * max_tokens)

    def observe(self, state, verdict):
        state["is_judged"] = True


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize(("first", "said"), [(7, "ValueError"), (8, "longer than 0.3 s")])
def test_a_drafter_s_fault_in_a_text_of_a_batch_is_no_other_s(demo_engine, first, said, is_strict):
    """Neither are the others asked twice. With --strict its pass counts as its token does."""
    loaded = {"choosy": TimedDrafter(Choosy(), 0.3)}
    engine = core.Engine(demo_engine.target, loaded, "choosy", is_strict=is_strict)
    texts = [engine.open(Request([token, *PROMPT], 6, "choosy")) for token in (5, first, 6)]
    while running := [s for s in texts if not s.finish_reason]:
        engine.step(running)
    one, bad, other = texts
    for s in texts:
        engine.close(s)
    assert not one.warnings + other.warnings and said in bad.warnings[0]
    assert {one.finish_reason, other.finish_reason} == {"length"}
    assert (said in str(bad.failure)) == is_strict == (bad.finish_reason == "error")
    counted = bad.statistics
    assert counted.completion_tokens == len(bad.output) == counted.passes


@pytest.mark.parametrize("where", ["matcher", "drafter", "prefix", "planner", "close"])
def test_whatever_raises_as_a_request_is_opened_gives_its_row_back(demo_engine, where):
    """Also in the method in one function."""
    drafter, target = ScriptedDrafter(lambda *_: [7]), demo_engine.target
    engine = core.Engine(target, {"scripted": drafter})
    grammar, num_free = None, len(target.cache._free)
    if where == "matcher":
        grammar = SimpleNamespace(matcher=exits)
    elif where == "prefix":
        engine.pool.prefixes = SimpleNamespace(restore=exits)
    elif where == "planner":
        engine.planner.open = exits
    else:
        setattr(drafter, "close" if where == "close" else "open", exits)
        with pytest.raises(SystemExit):
            core.speculate(target, drafter, PROMPT, 4, set())
    if where != "close":
        with pytest.raises(SystemExit):
            engine.open(Request(PROMPT, 4, "scripted", grammar=grammar))
        assert drafter.num_open == 0
    assert len(target.cache._free) == num_free


def test_an_error_s_words_are_looked_for_and_no_more():
    for error, words in (
        (KeyError(bad("__repr__")()), "KeyError, whose text cannot be read"),
        (bad("__str__", base=ValueError)(), "Bad, whose text cannot be read"),
        (Unnamed("Bad", (Exception,), {})(), "an error, whose text cannot be read"),
    ):
        assert in_short(error) == in_short(error, has_kind=True) == words
