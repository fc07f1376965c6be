"""Convolutions and rules of recurrent layers in C: what Python computes, and steady bits."""

import pytest
import torch

from cache.states import GatedDelta, Mamba2
from kernels import library, recurrent

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason="no C compiler here")
SIZES = [(1, 8, 16), (2, 24, 20), (3, 128, 72), (2, 5, 131)]  # heads of keys, widths, columns
COUNT = 70


def options_of(rule, size):
    """What transformers' function would be given for COUNT tokens, two heads to one of keys."""
    num_keys, width, columns = size
    random = torch.Generator().manual_seed(sum(size))

    def new(*shape):
        return torch.randn(1, COUNT, *shape, generator=random)

    keys, heads = (new(num_keys, width), new(num_keys, width)), 2 * num_keys
    if isinstance(rule, GatedDelta):
        given = {"query": keys[0], "key": keys[1], "value": new(heads, columns)}
        given |= {"g": -new(heads).abs(), "beta": new(heads).sigmoid()}
        return given | {"use_qk_l2norm_in_kernel": True}
    given = {"x": new(heads, columns), "dt": new(heads), "b": keys[0], "c": keys[1]}
    bias = torch.randn(heads, generator=random)
    return given | {"a": -bias.abs(), "dt_bias": bias, "dt_softplus": True}


def read(rule, options):
    """The rule, and what it needs of each token of one text."""
    form, inputs = rule.read(**options)
    return form, [x[0] for x in inputs]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("rule", [GatedDelta(), Mamba2()], ids=["delta", "mamba"])
def test_a_rule_gives_what_python_gives_however_its_text_is_cut(monkeypatch, rule, size):
    """But for roundings; cut anyhow it gives the same bits, and the states before stay.

    With other texts or alone, in any number of threads.
    """
    form, inputs = read(rule, options_of(rule, size))
    ((whole, outputs),) = recurrent.step(form, [inputs], [None])
    python = recurrent.step_in_python(form, [inputs], [None])[0]
    for given in zip((whole, outputs), python, strict=True):
        torch.testing.assert_close(*given, rtol=1e-4, atol=1e-4)
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        state, parts = None, []
        for begin, end in ((0, 1), (1, 30), (30, 30), (30, 33), (33, COUNT)):
            texts = [[x[i:j] for x in inputs] for i, j in ((5, 9), (begin, end), (0, 40))]
            before = None if state is None else state.clone()
            _, (after, part), _ = recurrent.step(form, texts, [whole, state, None])
            assert state is None or torch.equal(state, before)
            state, parts = after, [*parts, part]
        assert torch.equal(state, whole) and torch.equal(torch.cat(parts), outputs)


@pytest.mark.parametrize("channels", [1, 16, 77])
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_a_convolution_gives_what_python_gives_however_its_text_is_cut(channels, taps):
    random = torch.Generator().manual_seed(channels)
    text, tail, weight, bias = (
        torch.randn(*shape, generator=random)
        for shape in ((40, channels), (taps - 1, channels), (taps, channels), (channels,))
    )
    for given in ((weight, None), (weight, bias)):
        (whole,), (end,) = recurrent.convolve([text], [tail], *given)
        (theirs,), (their_end,) = recurrent.convolve_in_python([text], [tail], *given)
        torch.testing.assert_close(whole, theirs, rtol=1e-5, atol=1e-5)
        assert torch.equal(end, their_end)
        now, parts, before = tail, [], tail.clone()
        for i, j in ((0, 1), (1, 3), (3, 3), (3, 40)):
            found, (_, now) = recurrent.convolve([text[2:9], text[i:j]], [tail, now], *given)
            parts.append(found[1])
        assert torch.equal(torch.cat(parts), whole) and torch.equal(now, end)
        assert torch.equal(tail, before)


def test_what_would_not_lie_on_a_stack_is_refused():
    """The process would end with a signal."""
    with pytest.raises(MemoryError):
        recurrent.convolve([torch.ones(1, 2)], [torch.ones(99_999, 2)], torch.ones(100_000, 2))
    form, inputs = read(GatedDelta(), options_of(GatedDelta(), (1, 100_000, 1)))
    with pytest.raises(MemoryError):
        recurrent.step(form, [inputs], [None])
