"""Convolutions and rules of recurrent layers, of several texts in one call.

In C (recurrent.c), and in Python where nothing is compiled.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from . import library
from .library import address
from .structs import STRUCTS

Convolution, _Passage, _RuleInput = map(STRUCTS.get, ("convolution", "conv_text", "rule_input"))
Rule = STRUCTS["rule"]  # how a token changes a state [heads, width, columns]


def convolve(
    texts: Sequence[Tensor], tails: Sequence[Tensor], weight: Tensor, bias: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Convolve each text's tokens [t, C], behind its tail [taps - 1, C]: results and next tails.

    weight [taps, C], the oldest token's first; all float32 in the end. The tails stay as they are.
    """
    taps, channels = weight.shape
    weight, bias = _numbers(weight), None if bias is None else _numbers(bias)
    texts, tails = list(map(_numbers, texts)), list(map(_numbers, tails))
    for text, tail in zip(texts, tails, strict=True):
        assert text.shape == (len(text), channels) and tail.shape == (taps - 1, channels)
    assert bias is None or bias.shape == (channels,)
    results, after = list(map(torch.empty_like, texts)), list(map(torch.empty_like, tails))
    every = zip(texts, tails, after, results, strict=True)
    structs = [_Passage(len(x[0]), channels, channels, *map(address, x)) for x in every]
    passages = (_Passage * len(texts))(*structs)
    form = Convolution(channels, taps, False, address(weight), address(bias))
    library.compute("apply_convolution", ctypes.byref(form), passages, len(passages))
    return results, after


def step(
    rule: Rule, texts: Sequence[Sequence[Tensor]], states: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    """The state behind each text's tokens, and their outputs [t, heads, columns].

    A text is keys and queries [t, key_heads, width], values [t, heads, columns], logarithms of
    decays and betas [t, heads]. Its state before stays as it is; None: nothing was read yet.
    """
    size, keys = (rule.heads, rule.width, rule.columns), (rule.key_heads, rule.width)
    shapes = keys, keys, (rule.heads, rule.columns), (rule.heads,), (rule.heads,)
    references, structs, results = [], [], []
    for text, state in zip(texts, states, strict=True):
        inputs, before = list(map(_numbers, text)), None if state is None else _numbers(state)
        for x, shape in zip(inputs, shapes, strict=True):
            assert x.shape == (len(inputs[0]), *shape), "sizes that do not go together"
        assert before is None or before.shape == size
        out = inputs[0].new_empty(len(inputs[0]), rule.heads, rule.columns)
        results.append((inputs[0].new_empty(size), out))
        references += [inputs, before]
        steps = rule.key_heads * rule.width, rule.heads * rule.columns, rule.heads
        places = map(address, (*inputs, before, *results[-1]))
        structs.append(_RuleInput(len(out), *steps, *places))
    rule_inputs = (_RuleInput * len(structs))(*structs)
    library.compute("apply_rule", ctypes.byref(rule), rule_inputs, len(rule_inputs))
    return results


def convolve_in_python(
    texts: Sequence[Tensor], tails: Sequence[Tensor], weight: Tensor, bias: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """What `convolve` gives but for roundings, on any device."""
    results, after, taps = [], [], weight.float()
    for text, tail in zip(texts, tails, strict=True):
        every, count = torch.cat([tail, text]).float(), len(text)
        result = every[:count] * taps[0]
        for i in range(1, len(taps)):
            result += every[i : i + count] * taps[i]
        results.append(result if bias is None else result + bias.float())
        after.append(every[count:].clone())
    return results, after


def step_in_python(
    rule: Rule, texts: Sequence[Sequence[Tensor]], states: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    """What `step` gives but for roundings, on any device."""
    results = []
    for text, state in zip(texts, states, strict=True):
        keys, queries, values, logs, betas = (x.float() for x in text)
        both = torch.stack([keys, queries])  # [2, t, key_heads, width]
        if rule.has_norm:
            both = both * torch.rsqrt((both * both).sum(-1, keepdim=True) + 1e-6)
        both = both.repeat_interleave(rule.heads // rule.key_heads, 2)[..., None, :]
        if state is None:
            state = both.new_zeros(rule.heads, rule.width, rule.columns)
        tokens = both[0], both[1] * rule.scale, values[:, :, None], logs.exp(), betas
        outputs = []
        for key, query, value, decay, beta in zip(*tokens, strict=True):
            state = state * decay[:, None, None]
            change = value - torch.bmm(key, state) if rule.corrects else value
            state.baddbmm_(key.mT, change * beta[:, None, None])
            outputs.append(torch.bmm(query, state)[:, 0])
        results.append((state, torch.stack(outputs)))
    return results


def _numbers(x: Tensor) -> Tensor:
    """Contiguous float32 numbers; the caller holds them until C has read them."""
    return x.detach().float().contiguous()
