"""A recurrent layer's state depends on the text alone, whatever was drafted, refused or broken.

Such a state cannot be truncated as keys can: a layer goes back to an earlier state, and steps again
over what was accepted. test_cache.py compares the logits with a recompute without a cache, of rules
in C and of those in Python; what is in C is in kernels_bits.c, too.
"""

from functools import cache
from random import Random
from unittest.mock import Mock

import conftest
import pytest
import torch
from conftest import load, needs_compiler, open_rows, read, run
from exactness import assert_same_bits

from runtime import kernels
from runtime.cache.states import GatedDelta, RecurrentLayer
from runtime.kernels import recurrent
from runtime.kernels.start import speed_up
from server import core
from server.options import Options

PYTHON = " in Python"
FEW = ["qwen3_5_text", "lfm2", "granitemoehybrid", "lfm2 in Python", "granitemoehybrid in Python"]
TEXT = torch.randint(4096, (230,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.fixture(scope="module")
def target(tiny_folder):
    """An exact target of a family, its rules in C, or in Python as where there is no compiler."""

    @cache
    def load_target(family):
        model = core.load_model(str(tiny_folder(family.removesuffix(PYTHON))), Options())
        for layer in model.cache.recurrent:
            layer._is_compiled = not family.endswith(PYTHON)
        speed_up(model)
        assert conftest.make_exact(model), model.report
        return model

    return load_target


@pytest.fixture
def model(target, family):
    return target(family)


@pytest.fixture
def row(model):
    """A row of the model's cache that has read the first tokens of the text."""
    with open_rows(model, TEXT[:20]) as (row,):
        yield row


def intercept(monkeypatch, layer, name, function):
    """Replace a function of a layer, whether its module calls it or a fused block."""
    monkeypatch.setattr(layer, name, function)
    if layer._ours is not None and name != "_run":
        called = "causal_conv1d_fn" if name == "convolve" else layer._kind.name
        monkeypatch.setitem(layer._ours.__func__.__globals__, called, function)


DRAFTS = {  # tokens drafted, tokens accepted and rows of a forward: one forward, or four
    f"{accepted} of {drafted}": (drafted, accepted, most_rows)
    for drafted, most_rows, taken in ((5, 256, (0, 1, 5)), (24, 8, (7, 8, 24)))
    for accepted in taken
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("family", FEW)
def test_what_was_taken_back_leaves_no_trace(model, row, monkeypatch, draft):
    """The bits of what follows are those of a text that had no draft."""
    drafted, accepted, most_rows = DRAFTS[draft]
    monkeypatch.setattr("runtime.kernels.decoder.MOST_ROWS", most_rows)
    wrong = [7] * (drafted - accepted)
    verified = read(model, row, [*TEXT[20 : 21 + accepted], *wrong])
    model.cache.keep(row, drafted, range(accepted))
    assert model.cache.lengths[row] == 21 + accepted
    after = [read(model, row, [token]) for token in TEXT[21 + accepted : 24 + accepted]]
    model.cache.truncate(row, 0)
    read(model, row, TEXT[:20])
    for token, expected in zip(TEXT[20:], [*verified[: accepted + 1], *after], strict=False):
        assert torch.equal(read(model, row, [token])[0], expected.flatten())


@pytest.mark.parametrize("family", conftest.HYBRIDS)
def test_a_token_has_the_same_bits_however_it_is_computed(model):
    assert_same_bits(model, 8, Random(4))


@pytest.mark.parametrize("family", FEW)
def test_a_forward_that_fails_in_a_layer_leaves_no_trace(model, row, monkeypatch):
    """Every other layer has gone on by then; and a neighbour's state stays, too.

    It fails before a draft that was refused in part is taken back, while it is, and after that.
    """
    broken = model.cache.recurrent[-1]
    names = ["passed", "note"] if model.compiled.is_compiled else ["convolve", "scan"]
    with open_rows(model, TEXT[50:80]) as (other,):
        expected, theirs = model.forward([row, other], [TEXT[20:23], TEXT[80:81]], [3, 1]).logits
        model.cache.truncate(row, 21)
        model.cache.truncate(other, 30)
        for name in ["_run", *names] if broken._kind else ["convolve"]:
            intercept(monkeypatch, broken, name, lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model.forward([row, other], [[1, 2, 3, 4], [5]], [4, 1])
            monkeypatch.undo()
        again = model.forward([row, other], [TEXT[21:23], TEXT[80:81]], [2, 1]).logits
    assert torch.equal(again[0], expected[1:]) and torch.equal(again[1], theirs)


@pytest.mark.parametrize("family", FEW)
def test_a_text_keeps_its_state_while_others_come_and_go(model, row):
    expected = read(model, row, TEXT[20:26])
    model.cache.truncate(row, 20)
    first = model.cache.open_row()
    with open_rows(model, TEXT[5:40]) as (last,):
        model.forward([first], [TEXT[:9]], [1])
        model.cache.close_row(first)  # the last row takes its slot
        with open_rows(model, []) as (new,):
            texts = [[3], TEXT[20:26], TEXT[:20]]
            logits = model.forward([last, row, new], texts, [1, 6, 1]).logits[1]
            assert torch.equal(logits, expected)
            # In a row that had another text.
            assert torch.equal(read(model, new, TEXT[20:26]), expected)


@pytest.mark.parametrize("family", FEW)
def test_a_call_of_many_forwards_that_fails_is_done_again(model, row, monkeypatch):
    """The row goes back to where the call began, as in the core. Few marks are kept meanwhile."""
    layer = model.cache.recurrent[-1]
    expected = read(model, row, TEXT[20:230])[-1]
    model.cache.truncate(row, 0)
    read(model, row, TEXT[:20])
    monkeypatch.setattr("runtime.kernels.decoder.MOST_ROWS", 8)
    name = "passed" if model.compiled.is_compiled else "convolve"
    inner, calls = getattr(layer, name), []

    def fail(*args, **options):
        calls.append(len(layer._marks[row]))
        return inner(*args, **options) if len(calls) % 12 else 1 / 0

    intercept(monkeypatch, layer, name, fail)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            read(model, row, TEXT[20:230])
        model.cache.truncate(row, 20)
    intercept(monkeypatch, layer, name, inner)
    assert torch.equal(read(model, row, TEXT[20:230])[-1], expected) and max(calls) <= 6


def test_a_layer_keeps_the_defaults_of_its_options():
    class Mixer(torch.nn.Module):
        def forward(self, x, attention_mask=None, *, past_key_values=None, scale=2):
            return x * scale

    mixer, cache = Mixer(), object()
    RecurrentLayer(mixer, cache, None)
    assert mixer(3, past_key_values=cache) == mixer(3) == 6


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_going_back_too_far_is_an_error_and_not_a_wrong_state(model, row):
    read(model, row, TEXT[20:100])  # longer than any draft: nothing is recorded
    model.cache.truncate(row, 60)
    with pytest.raises(ValueError, match="a recurrent layer cannot go back to 60 tokens"):
        read(model, row, [1])
    model.cache.truncate(row, 0)  # an empty text has a state that everybody knows
    assert torch.isfinite(read(model, row, TEXT[:3])).all()


def test_a_trace_tells_how_far_the_states_go_back(prompts, monkeypatch):
    """The rule in Python counts its steps: what is stepped again is what the trace says."""
    engine = load("hybrid", kernels=False)
    for drafter in ("mtp", "ngram"):
        counted = Mock(wraps=kernels.step_in_python)
        monkeypatch.setattr(kernels, "step_in_python", counted)
        _, events = run(engine, prompts["code_class"], max_tokens=60, drafter=drafter)
        steps = [len(logs) for call in counted.call_args_list for *_, logs, _ in call.args[1]]
        monkeypatch.undo()
        fed, begin = 0, 0
        for event in events:
            verified, kept = event["cached"]
            again = kept - begin if event["step"] and kept < verified else 0
            expected = {"layers": 6, "from": verified, "to": kept, "stepped": again}
            assert event["recurrent"] == expected
            fed, begin = fed + verified - begin + again, kept
        assert sum(steps) == 6 * (fed - again)  # what the last cycle refused is not needed
        assert any(event["recurrent"]["stepped"] for event in events)


def test_closed_texts_give_their_memory_back(target):
    model = target("qwen3_5_text")
    layer = model.cache.recurrent[0]
    with open_rows(model, *[[]] * 6) as rows:
        model.forward(rows, [[1, 2]] * len(rows), [1] * len(rows))
        for mark in (layer._marks[row][0] for row in rows):  # nothing of its neighbours
            assert all(x.untyped_storage().nbytes() == x.nbytes for x in (mark.fed, *mark.inputs))
    layer._marks.pop(rows[-1])  # opened next: as if it were new
    with open_rows(model, [1, 2]) as (row,):
        assert set(layer._marks) == {row}


@needs_compiler
@pytest.mark.parametrize(("channels", "taps"), [(1, 1), (77, 2), (16, 4)])
def test_a_convolution_gives_what_python_gives(channels, taps):
    random = torch.Generator().manual_seed(channels)
    shapes = (40, channels), (taps - 1, channels), (taps, channels), (channels,)
    text, tail, weight, bias = (torch.randn(*shape, generator=random) for shape in shapes)
    for added in (None, bias):
        (whole,), (end,) = recurrent.convolve([text], [tail], weight, added)
        (theirs,), (their_end,) = recurrent.convolve_in_python([text], [tail], weight, added)
        torch.testing.assert_close(whole, theirs, rtol=1e-5, atol=1e-5)
        assert torch.equal(end, their_end)


@needs_compiler
def test_what_would_not_lie_on_a_stack_is_refused():
    """The process would end with a signal."""
    with pytest.raises(MemoryError):
        recurrent.convolve([torch.ones(1, 2)], [torch.ones(99_999, 2)], torch.ones(100_000, 2))
    wide, narrow = torch.ones(1, 1, 1, 100_000), torch.ones(1, 1, 1, 1)
    options = {"query": wide, "key": wide, "value": narrow, "use_qk_l2norm_in_kernel": True}
    form, inputs = GatedDelta().read(**options, g=-narrow[0], beta=narrow[0])
    with pytest.raises(MemoryError):
        recurrent.step(form, [[x[0] for x in inputs]], [None])
