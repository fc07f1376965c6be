"""A drafter proposes by the text alone, whatever it drafted before and whoever shares its call.

A drafter that fails, blocks or changes torch's settings costs its request the speculation, never
the answer; and one that cannot be used is refused in a line that says what to write.
"""

import inspect
import random
import re
import shutil
import sys
import threading
import tracemalloc
from copy import copy
from itertools import product
from unittest.mock import MagicMock, Mock

import conftest
import pytest
import torch
from conftest import WAYS, ScriptedDrafter, assert_lossless, fresh_state, propose_and_close, run
from head_contract import with_heads
from transformers import AutoModelForCausalLM

import drafters
from drafters import Context, Drafter, timed
from drafters.ngram import NgramIndex
from drafters.timed import Fault, TimedDrafter
from runtime.cache.prefix import PrefixCache
from runtime.kernels import library
from runtime.kernels.words import num_frequent
from runtime.values import Draft, Request, RequestError, in_short
from server import answers, core, log
from server.options import Options

HEADS = ["mtp", "eagle3", "dflash"]
EVERY = [(name, "compiled") for name in ("ngram", "suffix", "draft_model", *HEADS)]
EVERY += [(name, "modules") for name in HEADS]
FEW = "among few"
SAMPLINGS = {
    "greedy": conftest.GREEDY,
    "sampled": core.Sampling(1.2, 1.0, 50),
    FEW: core.Sampling(temperature=1.0, allowed_token_ids=(12, 1117, 1381)),
}


@pytest.mark.parametrize(
    ("name", "form", "way"),
    [(*each, way) for each in EVERY for way in SAMPLINGS if "modules" not in each or way == FEW],
)
def test_a_rolled_back_state_proposes_like_a_fresh_one(prompts, name, form, way):
    """Whatever of its drafts was refused before, in a batch whose texts end one by one.

    Among few tokens a head of random weights is right now and then, too. No row is kept.
    """
    engine = with_heads(form == "compiled")
    lengths = {"repetitive_counting": (20, 4), "hard_prose": (12, 6), "code_function": (8, 1)}
    asked = [
        Request(prompts[prompt], *(count, name, k), sampling=SAMPLINGS[way])
        for prompt, (count, k) in lengths.items()
    ]
    s, cycles = conftest.run_beside_fresh(engine, *asked)
    assert sum(cycle.num_drafted for cycle in cycles) > 12
    assert s.statistics.num_accepted_draft_tokens or way != FEW
    if name in HEADS:
        cache = engine.pool.drafters[name]._cache
        assert cache.lengths == [0] * 8 and sorted(cache._free) == list(range(8))


@pytest.mark.parametrize("tail", [3, 70], ids=["short", "long"])
@pytest.mark.parametrize("name", HEADS)
def test_hidden_states_are_remembered_where_they_stand(name, tail):
    """A head drafts as without a memory, whichever drafter read the prompt, and beside what.

    A block that is remembered has 64 tokens.
    """
    loaded = with_heads(True)
    target, alone = loaded.target, {name: loaded.pool.drafters[name]}
    random = torch.Generator().manual_seed(tail)
    prompt, other = torch.randint(4096, (2, 128 + tail), generator=random).tolist()
    apart, expected = run(core.Engine(target, alone), prompt, max_tokens=12, drafter=name)
    pairs = (None, None, name), (None, name, None), (name, None, None), (name,) * 3
    for first, second, beside in pairs:
        engine = core.Engine(target, alone, prefixes=PrefixCache.of(target, 64))
        run(engine, prompt[:129], max_tokens=1, drafter=first)
        asked = ((other, beside), (prompt, second), (prompt[::-1], beside))
        batch = conftest.together(engine, [Request(text, 4, drafter) for text, drafter in asked])
        assert not any(s.failure for s in batch)
        s, events = run(engine, prompt, max_tokens=12, drafter=name)
        assert s.output == apart.output and not s.warnings, (first, second, beside)
        assert [e["proposals"] for e in events] == [e["proposals"] for e in expected]


@pytest.mark.parametrize(("name", "rule", "expected"), [
    ("mtp", "coupled", 1.0), ("mtp", "rejection", 1.2), ("draft_model", "coupled", 1.2),
])  # fmt: skip
def test_a_head_draws_more_surely_where_q_is_not_judged(demo_engine, prompts, name, rule, expected):
    """A draft model does not: it may be close to the target."""
    drafter, text, noise = demo_engine.pool.drafters[name], prompts["hard_story"], core.Noise(7)
    asked, drawn = (core.Sampling(temperature=t, verification=rule) for t in (1.2, expected))
    states = [fresh_state(demo_engine, drafter, text, asked, noise) for _ in range(2)]
    states[1].sampling = drawn
    first, second = propose_and_close(drafter, states, [12, 12])
    assert first == second


def uniform(limit):
    return torch.full((limit, 4096), 1 / 4096)


def one_hot(limit, token):
    return torch.zeros(limit, 4096).index_fill_(1, torch.tensor([token]), 1)


@pytest.mark.parametrize(("probs", "reason"), [
    (lambda k: uniform(k + 1), "probs of shape [6, 4096] for 5 tokens"),
    (lambda k: uniform(k) * 2, "probs are no distributions"),
    (lambda k: uniform(k) * torch.nan, "probs are no distributions"),
    (lambda k: one_hot(k, 7) * 2 - one_hot(k, 8), "probs are no distributions"),
    (lambda k: uniform(k).index_fill_(1, torch.tensor([7]), 0),
     "probs are no distributions that the tokens can be drawn from"),
    (lambda k: uniform(k).tolist(), "probs are a list: write a torch.Tensor, or None"),
    (lambda k: uniform(k) > 0, "probs are a tensor of torch.bool, "),
    (lambda k: uniform(k) + 0j, "probs are a tensor of torch.complex64, "),
    (lambda k: uniform(k).to_sparse(), ", torch.sparse_coo, on cpu: write a dense one"),
    (lambda k: uniform(k).to("meta"), ", on meta: write a dense one of floating point"),
    (lambda k: uniform(k).requires_grad_(), None),
    (uniform, None),
])  # fmt: skip
def test_probs_that_cannot_be_are_a_failure_of_the_drafter(demo_engine, prompts, probs, reason):
    """Token 7 is proposed with a q that it cannot have been drawn from; or, at the end, can."""
    engine = conftest.scripted_engine(demo_engine, lambda _, k: [7] * k, lambda _, k: probs(k))
    prompt, rejection = prompts["easy_json"], core.Sampling(1.0, 1.0, verification="rejection")
    sequence, _ = run(engine, prompt, max_tokens=8, drafter="scripted", sampling=rejection)
    assert len(sequence.output) == 8
    assert [reason in warning for warning in sequence.warnings] == [True] * bool(reason)
    for way in WAYS.values():  # nothing that a drafter says of its chances counts here
        assert not assert_lossless(engine, prompt, 8, "scripted", **way).warnings
        fields = {"drafter": "scripted", "trace": True, "max_tokens": 8, **way}
        assert not run(engine, prompt, **fields)[0].warnings


def test_probs_are_judged_as_they_were_proposed(demo_engine, prompts):
    """A thread of the drafter may change them between the draft and the verdict."""
    rejection, outputs = core.Sampling(1.0, 1.0, verification="rejection"), []
    for is_changed in (False, True):
        made = []
        engine = conftest.scripted_engine(
            demo_engine, lambda _, k: [7] * k, lambda _, k, made=made: made[-1]
        )
        conftest.before(engine.pool, "propose", lambda *_, made=made: made.append(uniform(5)))
        if is_changed:
            conftest.before(engine, "accept", lambda *_, made=made: made[-1].zero_())
        fields = {"max_tokens": 30, "drafter": "scripted", "sampling": rejection, "fixed_k": True}
        outputs.append(run(engine, prompts["easy_json"], **fields)[0].output)
    assert outputs[0] == outputs[1]


def test_a_careless_drafter_changes_no_text(demo_engine, prompts, plain):
    """One list is every draft of a batch, and is emptied as soon as a verdict is heard."""
    tokens, drafter = [], ScriptedDrafter(None)

    def propose(state, max_tokens):
        tokens[:] = [*state[-1:], *state[-3:]][:max_tokens]
        return Draft(tokens)

    drafter.propose = propose
    conftest.before(drafter, "observe", lambda *_: tokens.clear())
    engine = core.Engine(demo_engine.target, {"scripted": drafter}, "scripted")
    requests = [Request(text, 12, "scripted") for text in list(prompts.values())[:4]]
    for s in conftest.together(engine, requests):
        assert s.output == plain(s.request.prompt, 12) and not s.warnings


@pytest.mark.parametrize(
    ("method", "most", "came"),
    [("open", 0, 0), ("open", 12, 0), ("propose", 12, 2), ("observe", 12, 2), ("close", 12, 12)],
)
def test_a_strict_engine_fails_the_request_of_a_drafter(
    demo_engine, monkeypatch, method, most, came
):
    drafter, cache = ScriptedDrafter(lambda tokens, k: tokens[-k:]), demo_engine.target.cache
    engine = core.Engine(demo_engine.target, {"scripted": drafter}, is_strict=True)
    error = RuntimeError("out of ideas\nand of lines")
    monkeypatch.setattr(drafter, method, Mock(side_effect=error))
    num_free = len(cache._free)
    how = "failed to close" if method == "close" else "failed"
    with pytest.raises(RequestError, match=rf"^drafter scripted {how} \(out of ideas") as caught:
        run(engine, [5, 6, 7], max_tokens=most, drafter="scripted")
    assert (len(cache._free), drafter.num_open) == (num_free, method == "close")
    assert engine.totals.by_drafter["scripted"].completion_tokens == came
    assert caught.value.status == 500  # over HTTP, with this message alone
    assert answers._warnings(engine) == ["failures of scripted: 1; these requests failed: --strict"]


def test_who_leaves_hears_nothing_of_a_strict_drafter_that_cannot_close(demo_engine, monkeypatch):
    drafter = ScriptedDrafter(lambda tokens, k: tokens[-k:])
    engine = core.Engine(demo_engine.target, {"scripted": drafter}, is_strict=True)
    monkeypatch.setattr(drafter, "close", Mock(side_effect=RuntimeError("no")))
    cycles = engine.generate(Request([5, 6, 7], 12, "scripted"))
    next(cycles)
    cycles.close()
    assert engine.pool.failures["scripted"] == 1 and not engine.target.cache.rows


def test_an_error_of_megabytes_is_cut_before_it_is_looked_through():
    """As long as a request may be: the log stays short, and others are not held up."""
    error = RuntimeError("x\n" * 800_000 + "the end")
    tracemalloc.start()
    said, (_, most) = in_short(error), tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(said) == 300 and said.endswith("the end") and most < 200_000
    try:
        raise error
    except RuntimeError:
        record = log.LOG.makeRecord("x", 30, "", 1, "failed: %s", (said,), sys.exc_info())
    for form in (log._Format(), log._Words()):
        text = form.format(record)
        assert len(text) < 70_000 and "Traceback" in text and "the end" in text


# What loaders of models set, and leave set: the numbers' type, the device, threads and others.
CHANGED = (torch.float64, "meta", 3, False, 2, "medium")


def torch_s_settings():
    return [read() for read, _ in timed._SETTINGS]


def change_settings(*_, values=CHANGED):
    for value, (_, put) in zip(values, timed._SETTINGS, strict=True):
        put(value)


@pytest.fixture
def settings():
    """As they are before the test, and after it, whatever fails."""
    before = torch_s_settings()
    yield before
    change_settings(values=[before[0], None, *before[2:]])


@pytest.mark.parametrize("method", ["open", "propose", "observe", "close"])
def test_a_drafter_that_changes_torch_s_settings_changes_no_bit(
    demo_engine, prompts, settings, method
):
    """They were for the drafter alone, in its thread."""
    loaded, logprobs = {"mtp": demo_engine.pool.drafters["mtp"]}, []
    for is_changing, way in product((False, True), WAYS.values()):
        drafter = ScriptedDrafter(lambda tokens, k: tokens[-k:])
        if is_changing:
            conftest.before(drafter, method, change_settings)
        loaded["scripted"] = drafter = TimedDrafter(drafter, 60.0)
        engine = core.Engine(demo_engine.target, loaded, "scripted")
        s = assert_lossless(engine, prompts["easy_json"], 10, "auto", logprobs=2, **way)
        logprobs.append(s.logprobs)
        assert torch_s_settings() == settings and not s.warnings
        drafter._inner.settings = torch_s_settings
        assert drafter.call("settings") == [*settings[:2], 1, *settings[3:]]
    assert logprobs[:2] == logprobs[2:]


def test_c_is_handed_no_buffer_of_another_type_or_size():
    numbers = torch.zeros(2, 3, dtype=torch.float32)
    assert library.address(numbers, 2, 3).value == numbers.data_ptr()
    for wrong in (numbers.double(), numbers.bfloat16(), numbers.T, numbers.to("meta"), numbers[:1]):
        with pytest.raises(AssertionError):
            library.address(wrong, 2, 3)


class Blocking(Drafter):
    """Waits outside of Python until it may go on."""

    name = "blocking"

    def __init__(self):
        self.may_go_on, self.closed = threading.Event(), []

    def propose(self, state, max_tokens):
        self.may_go_on.wait(60)
        return Draft([max_tokens])

    def close(self, state):
        self.closed.append(state)


def test_a_drafter_that_blocks_is_left_alone_until_it_returns():
    """And it is told where it waits. (test_faults.py has one that never returns.)"""
    inner = Blocking()
    drafter = TimedDrafter(inner, 0.1)
    thread = drafter._thread
    with pytest.raises(Fault, match="a call took longer than 0.1 s") as caught:
        drafter.propose("", 3)
    line = inspect.getsourcelines(Blocking.propose)[1] + 1
    assert f"test_drafters.py, line {line})" in drafter.line_of(caught.value, "open")
    with pytest.raises(Fault, match="still busy with an earlier call"):
        drafter.propose("", 3)
    drafter.close("one")  # another request ends meanwhile
    assert inner.closed == []
    drafter._limit_s = 60.0
    inner.may_go_on.set()
    thread.join(30)
    assert drafter.propose("", 3).tokens == [3] and inner.closed == ["one"]


def brute_force(tokens, smallest, largest, limit):
    """The longest suffix that stands earlier too, its latest place, read on into itself."""
    for size in range(min(largest, len(tokens)), smallest - 1, -1):
        for start in range(len(tokens) - 1, size - 1, -1):
            if tokens[start - size : start] == tokens[-size:]:
                return (tokens[start:] * limit)[:limit]
    return []


def test_the_index_agrees_with_a_brute_force_search():
    chance = random.Random(0)
    for smallest, more, _ in product((1, 2, 3), range(4), range(12)):
        index, tokens = NgramIndex(smallest, smallest + more), []
        for limit in range(1, 9):
            new = chance.choices(range(4), k=chance.randint(1, 5))
            tokens += new
            index.extend(new)
            expected = brute_force(tokens, smallest, smallest + more, limit)
            assert index.continuation(limit) == expected


def test_a_lookup_does_not_slow_down_with_the_text():
    """Work, not time: of 50 000 tokens it reads a suffix of each size, and its draft."""
    index, chance = NgramIndex(2, 4), random.Random(1)
    index.extend([chance.randrange(50) for _ in range(50_000)])
    text, index.tokens = index.tokens, MagicMock()
    index.tokens.__len__.return_value = len(text)
    index.tokens.__getitem__.side_effect = text.__getitem__
    assert index.continuation(8) and index.tokens.__getitem__.call_count <= 3 + 1


OWN = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from drafters import Draft, Drafter
from drafters.ngram import NgramDrafter

@dataclass
class State:
    tokens: list[int]

torch.set_default_dtype(torch.float64)

class Inherits(NgramDrafter):
    def propose(self, state, max_tokens):
        return Draft([7])

"""
MISTAKES = """
import torch
from drafters import Draft, Drafter

class Mine(Drafter):
    @torch.inference_mode()
    def propose(self, state, max_tokens):
        return Draft([1])

"""


@pytest.mark.parametrize(("mine", "message"), [
    ("def broken(:", "failed to load"),
    ("", "has no class 'Mine'"),
    ("Mine = Draft", "has no class 'Mine' of its own"),
    ("class Mine: pass", r"\(mine.py, line 18\): write class Mine\(Drafter\)"),
    ("class Mine(Inherits): name = 'ngram'", "the name 'ngram' of mine.py:Mine is taken"),
    ("class Mine(Drafter): pass", r"\(.*mine.py, line 18\): write def propose\(self"),
    ("class Mine(Drafter):\n  propose = Inherits.propose\n  def __init__(self, context): pass",
     r"'context' \(.*mine.py, line 18\): write def __init__\(self\), or"),
    ("class Mine(Inherits):\n  def open(self, prompt): pass",
     r"\(.*mine.py, line 19\): write def open\(self, prompt, sampling, noise"),
    ("class Mine(Inherits):\n  def build(context): raise RuntimeError('no luck')",
     "failed to start: no luck"),
    ("raise SystemExit('no luck')", r"failed to load: SystemExit: no luck \(.*mine.py, line 18\)"),
    ("class E(Exception):\n  def __str__(self): raise SystemExit\nraise E",
     r"failed to load: E, whose text .* \(.*mine.py, line 20\)"),
    ("class Mine(Inherits):\n  def build(context): raise SystemExit(0)",
     r"failed to start: SystemExit: 0 \(.*mine.py, line 19\)"),
    ("class Mine(Inherits):\n  def build(context): pass",
     "build returned a NoneType: write return cls"),
    ("class Mine(Inherits): name = ''", "name of Mine is '': write name = \"mine\""),
    ("class Mine(Inherits): name = 5", "name of Mine is 5: write name = \"mine\""),
    ("class Mine(Inherits): needs_hidden, hidden_layers = True, ()",
     r"hidden_layers of Mine are \(\): write a tuple of -1 .* such as \(-1,\)"),
    ("class Mine(Inherits): needs_hidden, hidden_layers = True, (1.0,)",
     r"hidden_layers of Mine are \(1.0,\)"),
    ("class Mine(Inherits): num_step_weights = None", "num_step_weights of Mine is None: write 0"),
    ("class Mine(Inherits): block_size = 10**40", "block_size of Mine is 1.*: write 0 or more"),
    ("from drafters.self_int8 import *\nclass Mine(Inherits): attach = SelfInt8Drafter.attach",
     "Mine needs SelfInt8Drafter.attach, which is not called for a drafter from a file: derive"),
])  # fmt: skip
def test_a_drafter_that_cannot_start_is_one_line(demo_engine, tmp_path, monkeypatch, mine, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN + mine)
    with pytest.raises(ValueError, match=message) as caught:
        drafters.load_all("mine.py:Mine", Context(demo_engine.target), True)
    assert "\n" not in str(caught.value)


def test_a_drafter_of_one_s_own_is_the_one_that_runs(demo_engine, prompts, tmp_path, settings):
    """Also one that inherits from a built-in drafter, whose name it must not take over.

    What its file changes of torch's settings is changed for itself alone.
    """
    (tmp_path / "own.py").write_text(OWN)
    given = f"{tmp_path}/own.py:Inherits", Context(demo_engine.target), True
    engine = core.Engine(demo_engine.target, *drafters.load_all(*given))
    assert torch_s_settings() == settings
    assert engine.default_drafter == "Inherits"
    _, events = run(engine, prompts["easy_json"], max_tokens=10, drafter="Inherits")
    assert all(event["proposals"] == [7] for event in events[1:-1])


def test_the_documents_drafter_runs(demo_engine, prompts, plain, tmp_path, monkeypatch):
    """It has a model and at most 25 lines. Its KV cache goes back by what it drafted."""
    text = (conftest.ROOT / "docs/models.md").read_text("utf-8")
    text = re.search(r"```python\n(\S+ drafters import Drafter\n.*?)```", text, re.DOTALL)[1]
    assert len([line for line in text.splitlines() if line]) <= 25
    (tmp_path / "mine.py").write_text(text, "utf-8")
    monkeypatch.chdir(conftest.ROOT)
    own = drafters.load(f"{tmp_path}/mine.py:Own", Context(demo_engine.target))
    engine = core.Engine(demo_engine.target, {"Own": own}, "Own", is_strict=True)
    theirs = demo_engine.pool.drafters["draft_model"]
    for prompt in list(prompts.values())[:3]:
        s, events = run(engine, prompt, max_tokens=20, drafter="Own")
        assert s.output == plain(prompt, 20)
        drafted = next(event["proposals"] for event in events[1:])
        state = fresh_state(demo_engine, theirs, [*prompt, s.output[0]])
        assert drafted == propose_and_close(theirs, [state], [len(drafted)])[0]


@pytest.mark.parametrize(("method", "result", "message"), [
    ("", "Draft([4096])", "proposed 4096"),
    ("", "Draft([-1])", "proposed -1"),
    ("", "Draft(['a'])", "proposed 'a'"),
    ("", "Draft([5] * 6)", "tokens proposed"),
    ("", "Draft([5, 6, 7], None, [-1])", "parents [-1] for 3 tokens"),
    ("", "Draft([5, 6, 7], None, [-1, 1, 0])", "parents [-1, 1, 0]"),
    ("", "Draft([5, 6, 7], None, [-2, 0, 1])", "parents [-2, 0, 1]"),
    ("", "Draft([5, 6, 7], None, 'abc')", "parents 'abc' for 3 tokens"),
    ("", "Draft([5, 6, 7], None, [-1.0, 0.0, 1.0])", "parents [-1.0, 0.0, 1.0] for 3 tokens"),
    ("", "Draft([5, 6], None, None, {0.2, 0.4})", "confidence is not a list of one number"),
    ("", "Draft([5, 6], None, None, [0.5, 1.5])", "confidence is not a list of one number"),
    ("", "[1, 2]", "propose returned a list: write return Draft(tokens)) ({}, line 6)"),
    ("", "Draft(torch.ones(2))", "a Tensor, not a list of tokens: write Draft([1, 2, 3])) ({}"),
    ("", "Draft(None)", "a NoneType, not a list of tokens: write Draft([1, 2, 3])) ({}"),
    ("", "Draft([*torch.ones(2)])", "4096 (a Tensor: write int(token))) ({}, line 6)"),
    ("", "1 / 0", "failed (division by zero) ({}, line 8)"),
    ("", "{}['x']", "failed (KeyError: 'x') ({}, line 8)"),
    ("open", "1 / 0", "failed (division by zero) ({}, line 11)"),
    ("open", "None", "open returned a NoneType: write return list(prompt), or observe, too) ({}"
     ", line 10)"),
    ("propose_batch", "[Draft([]), 2]", "one Draft for each state) ({}, line 10)"),
    ("observe", "state.last", "no attribute 'last') ({}, line 11)"),
    ("close", "1 / 0", "failed to close (division by zero) ({}, line 11)"),
])  # fmt: skip
def test_a_mistake_of_a_drafter_costs_no_answer_and_says_where_it_is(
    demo_engine, tmp_path, method, result, message
):
    """And what is to be returned there."""
    file, text = tmp_path / "mine.py", MISTAKES
    if method:
        given = ", ".join(inspect.signature(getattr(Drafter, method)).parameters)
        text += f"    def {method}({given}):\n        return {result}\n"
    file.write_text(text if method else text.replace("Draft([1])", result), "utf-8")
    drafter = drafters.load(f"{file}:Mine", Context(demo_engine.target))
    engine = core.Engine(demo_engine.target, {"Mine": drafter}, "Mine")
    (warning,) = assert_lossless(engine, [5, 6, 7], 6, "Mine").warnings
    assert message.format(file) in warning
    assert warning.endswith(": went on without speculation") or method == "close"


def test_what_does_not_fit_a_target_is_refused(demo_engine, tiny_folder, monkeypatch):
    monkeypatch.setattr("drafters.draft_model.plug", lambda _: None)  # nobody translates
    short = core.load_model(str(tiny_folder("llama:2")), Options())
    target, unknown = demo_engine.target, "unknown drafter '{}': choose ngram"
    other, swapped = copy(short), {300: 301, 301: 300}  # equal size is not an equal vocabulary
    words = {word: swapped.get(i, i) for word, i in target.tokenizer.get_vocab().items()}
    other.tokenizer = Mock(get_vocab=lambda: words)
    for name, given, message in (
        ("draft_model", Context(target, other), "only one of them has .* as id 300"),
        ("draft_model", Context(target, short), "give --max-model-len 256 or less"),
        ("mtp", Context(short), "has no MTP head .* use --drafter ngram"),
        *((name, Context(target), unknown.format(name)) for name in ("zzz", "auto", "none")),
    ):
        with pytest.raises(ValueError, match=message):
            drafters.load(name, given)


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(4096, 4160), (4160, 4096)])
def test_padded_embeddings_are_no_mismatch(tiny_folder, tmp_path, target_rows, draft_rows):
    """Either model may have rows that no token uses; q is as wide as the target either way."""
    models = []
    for name, rows in (("llama:1", target_rows), ("qwen3:2", draft_rows)):
        model = AutoModelForCausalLM.from_pretrained(tiny_folder(name))
        model.resize_token_embeddings(rows, mean_resizing=False)
        shutil.copytree(tiny_folder(name), tmp_path / name)
        model.save_pretrained(tmp_path / name)
        models.append(core.load_model(str(tmp_path / name), Options()))
    engine = core.Engine(models[0], {"draft_model": drafters.load("draft_model", Context(*models))})
    assert_lossless(engine, [5, 6, 7, 5, 6], 20, "draft_model")
    warm = core.Sampling(temperature=1.3, verification="rejection")
    sampled, _ = run(engine, [5, 6, 7], max_tokens=20, drafter="draft_model", sampling=warm)
    assert sampled.statistics.num_draft_tokens > 10 and not sampled.warnings
    if target_rows > draft_rows:  # an id that the draft model cannot read costs that request alone
        pair = [Request([5, start, 6], 20, "draft_model") for start in (4150, 7)]
        sequences = conftest.together(engine, pair)
        assert [s.statistics.num_draft_tokens > 0 for s in sequences] == [False, True]
        assert all(s.warnings == [] for s in sequences)


def test_a_draft_keeps_to_frequent_words_where_the_text_does(demo_engine, prompts, monkeypatch):
    """The output is the same; the text's own rare words come again, and of many all are drafted."""
    drafter = demo_engine.pool.drafters["draft_model"]

    def drafted(prompt, limit):
        monkeypatch.setattr(drafter._words, "num_frequent", limit)
        assert_lossless(demo_engine, prompt, 30, "draft_model")
        return propose_and_close(drafter, [fresh_state(demo_engine, drafter, prompt)], [20])[0]

    colours, table = prompts["repetitive_colours"], prompts["easy_table"]
    few = drafted(colours, max(colours) + 1)  # so the text has no rare word
    assert few and max(few) <= max(colours)
    assert any(token >= 2 for token in drafted(colours, 2))  # all are rare
    monkeypatch.setattr("runtime.kernels.words._MOST_RARE", 1.0)
    few = drafted(table, max(table) + 1)
    assert set(few) <= set(table) and drafted(table, max(few)) == few != []
    assert num_frequent(18_000_000, 256, 49_152) == 16_384  # more than half of it are words
    assert num_frequent(4_000_000, 128, 4096) == 4096
