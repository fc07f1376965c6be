"""Convolutions and rules of recurrent layers in C give what the ones in Python give.

Their bits do not depend on how a text is cut: it may be read at once or token by token, beside
other texts, in any number of threads.
"""

import pytest
import torch
from conftest import needs_compiler

from runtime.cache.states import GatedDelta, Mamba2
from runtime.kernels import recurrent

pytestmark = needs_compiler
SIZES = [(1, 8, 16), (2, 24, 20), (3, 128, 72), (2, 5, 131)]  # heads of keys, widths, columns
COUNT = 70


def inputs_of(rule, size):
    """The rule as C knows it, and what it reads of COUNT tokens, two heads to one of keys."""
    num_keys, width, columns = size
    random = torch.Generator().manual_seed(sum(size))

    def new(*shape):
        return torch.randn(1, COUNT, *shape, generator=random)

    one, other, heads = new(num_keys, width), new(num_keys, width), 2 * num_keys
    if isinstance(rule, GatedDelta):
        options = {"query": one, "key": other, "value": new(heads, columns)}
        options |= {"g": -new(heads).abs(), "beta": new(heads).sigmoid()}
        options |= {"use_qk_l2norm_in_kernel": True}
    else:
        options = {"x": new(heads, columns), "dt": new(heads), "b": one, "c": other}
        bias = torch.randn(heads, generator=random)
        options |= {"a": -bias.abs(), "dt_bias": bias, "dt_softplus": True}
    form, inputs = rule.read(**options)
    return form, [x[0] for x in inputs]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("rule", [GatedDelta(), Mamba2()], ids=["delta", "mamba"])
def test_a_rule_gives_what_python_gives_however_its_text_is_cut(rule, size, threads):
    """Cut anyhow and beside other texts it has the same bits, and states of the past stay."""
    form, inputs = inputs_of(rule, size)
    ((whole, outputs),) = recurrent.step(form, [inputs], [None])
    python = recurrent.step_in_python(form, [inputs], [None])[0]
    torch.testing.assert_close((whole, outputs), python, rtol=1e-4, atol=1e-4)
    for count in (1, 2, 3):
        threads(count)
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
    shapes = (40, channels), (taps - 1, channels), (taps, channels), (channels,)
    text, tail, weight, bias = (torch.randn(*shape, generator=random) for shape in shapes)
    for added in (None, bias):
        (whole,), (end,) = recurrent.convolve([text], [tail], weight, added)
        (theirs,), (their_end,) = recurrent.convolve_in_python([text], [tail], weight, added)
        torch.testing.assert_close(whole, theirs, rtol=1e-5, atol=1e-5)
        assert torch.equal(end, their_end)
        now, parts, before = tail, [], tail.clone()
        for i, j in ((0, 1), (1, 3), (3, 3), (3, 40)):
            texts, tails = [text[2:9], text[i:j]], [tail, now]
            (_, part), (_, now) = recurrent.convolve(texts, tails, weight, added)
            parts.append(part)
        assert torch.equal(torch.cat(parts), whole) and torch.equal(now, end)
        assert torch.equal(tail, before)


def test_what_would_not_lie_on_a_stack_is_refused():
    """The process would end with a signal."""
    with pytest.raises(MemoryError):
        recurrent.convolve([torch.ones(1, 2)], [torch.ones(99_999, 2)], torch.ones(100_000, 2))
    form, inputs = inputs_of(GatedDelta(), (1, 100_000, 1))
    with pytest.raises(MemoryError):
        recurrent.step(form, [inputs], [None])
