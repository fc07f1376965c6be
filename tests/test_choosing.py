"""Choosing in C gives the bits of its definition in runtime/sampling.py, on every machine.

So a token that a compiled draft chooses is the one that Python would choose from the same scores,
and scores without numbers are refused by both.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from conftest import needs_compiler

from drafters.tree import ranked
from runtime import sampling as module
from runtime.kernels import sampling as compiled
from runtime.sampling import Noise, choose, confidence, survivors
from server import core

CUTS = [
    (1.0, 0, 1.0, 0.0), (0.3, 0, 1.0, 0.0), (0.7, 40, 1.0, 0.0), (1.0, 3000, 1.0, 0.0),
    (1.3, 0, 0.95, 0.0), (1.0, 0, 0.999, 0.0), (1.0, 0, 1e-9, 0.0), (1.0, 0, 1.0, 0.3),
    (1.0, 0, 0.0, 0.0), (1.0, 1, 1.0, 1.0), (0.8, 20, 0.9, 0.02), (1.0, 3000, 0.5, 0.05),
]  # fmt: skip


@pytest.fixture(autouse=True)
def in_c(monkeypatch):
    monkeypatch.setattr(compiled, "is_wanted", True)


def rows():
    """Scores of many sizes: peaked and flat, with ties (bfloat16 has many), with -inf and zeros."""
    random = torch.Generator().manual_seed(0)
    for vocab, spread in itertools.product((1, 5, 64, 1000, 4160, 50_001), (0.1, 2.0, 9.0)):
        row = torch.randn(vocab, generator=random) * spread
        yield row
        yield row.bfloat16().float()
        yield torch.ones(vocab)
        masked = row.masked_fill(torch.rand(vocab, generator=random) < 0.5, -math.inf)
        masked[vocab // 2] = 0.0
        yield masked
        yield torch.where(torch.arange(vocab) % 2 == 0, -0.0, 0.0)


def both(function, *arguments):
    """What a function gives in C, and in Python."""
    result = function(*arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.kernels.can_choose", lambda: False)
        return [result, function(*arguments)]


@pytest.fixture(params=[pytest.param("C", marks=needs_compiler), "python"])
def language(request, monkeypatch):
    monkeypatch.setattr(compiled, "is_wanted", request.param == "C")


@needs_compiler
@pytest.mark.parametrize("cuts", [*CUTS, None], ids=str)
def test_c_chooses_what_python_chooses(cuts):
    """Without cuts it is greedy: of the largest the first."""
    seeds = itertools.cycle((0, 1, 2**40 + 3, -1))
    sampling = core.Sampling(1.0, *cuts) if cuts else core.Sampling()
    for row, seed in zip(rows(), seeds, strict=False):
        for result in zip(*both(survivors, row, *cuts), strict=True) if cuts else ():
            assert result[0].tolist() == result[1].tolist()
        chosen, other = both(choose, row, sampling, Noise(seed), 1000 * seed % 777)
        assert chosen == other and (cuts or chosen == (row == row.max()).nonzero()[0])
        result, other = both(ranked, row, [1, 2, 3], sampling, Noise(3), 4)
        assert result == other


@needs_compiler
def test_c_is_as_sure_of_a_token_as_python():
    for row in rows():
        for token in {0, len(row) // 2, len(row) - 1}:
            chance = float(row.double().softmax(0)[token])
            for sure in both(confidence, row, token):  # C adds in float32: nothing hangs on it
                assert sure == pytest.approx(chance, rel=1e-5, abs=1e-12)
    for no_number in (math.nan, -math.inf, math.inf):
        own = torch.tensor([no_number, 0.0])
        assert both(confidence, own, 0) == pytest.approx([0, 0])
    assert both(confidence, torch.tensor([0.0, math.nan]), 0) == [0, 0]


def test_of_equal_times_the_lower_id_wins(monkeypatch):
    monkeypatch.setattr(Noise, "exponentials", lambda *_: np.array([2.0, 1.0, 3.0, 1.0]))
    assert Noise(0).race(np.ones(4), np.array([3, 9, 1, 7]), 0) == 7


@pytest.mark.parametrize("vocab", [7, 200, 4096])
@pytest.mark.parametrize("number", [math.nan, math.inf, None], ids=str)
@pytest.mark.usefixtures("language")
def test_rows_that_are_no_numbers_are_refused(number, vocab):
    samplings = core.Sampling(), *(core.Sampling(1.0, *cuts) for cuts in CUTS)
    for at, sampling in itertools.product((0, vocab // 2, vocab - 1), samplings):
        row = torch.linspace(-1, 1, vocab)
        row[slice(None) if number is None else at] = number or -math.inf
        with pytest.raises(ValueError, match="no probabilities to draw from"):
            choose(row, sampling, Noise(0), 0)


@pytest.mark.usefixtures("language")
def test_a_row_is_chosen_from_where_it_lies_and_only_if_it_is_there():
    rows, samplings = torch.eye(3, 50), [core.Sampling(), core.Sampling(temperature=1.0, top_k=1)]
    layouts = rows, rows.bfloat16(), rows.T.contiguous().T
    for scores, sampling in itertools.product(layouts, samplings):
        assert [choose(scores, sampling, Noise(0), 0, row=i) for i in range(3)] == [0, 1, 2]
        assert choose(scores[1], sampling, Noise(0), 0) == 1
    with pytest.raises(IndexError):
        choose(rows, core.Sampling(), Noise(0), 0, row=3)
    with pytest.raises(IndexError):
        confidence(torch.zeros(3), 3)


def test_exp_and_log_are_near_the_true_ones():
    """Every sampled text is made of them, with a compiler or without."""
    x = -np.concatenate([np.linspace(0, 2, 999), np.logspace(-12, 2.84, 999)])
    np.testing.assert_allclose(module.exp(x), np.exp(x), rtol=3e-13, atol=0)
    assert module.exp(np.array([0.0, -701.0, -np.inf])).tolist() == [1, 0, 0]
    v = np.concatenate([np.logspace(-19, 0, 999)[:-1], np.linspace(0.001, 0.999, 999)])
    np.testing.assert_allclose(module._minus_log(v), -np.log1p(-v), rtol=1e-15, atol=0)
    assert module._minus_log(np.array([1.0, 1 - 2**-53])).max() < 38
