"""What a row of the KV cache forgets leaves no trace: a truncated row is as one that never read it.

Rows have lengths of their own, so rejected tokens cost a change of the length, and no tensor is
touched. It holds in every family of attention, against a recompute without a cache.
"""

from contextlib import nullcontext
from copy import deepcopy
from itertools import product
from random import Random

import pytest
import torch
from conftest import HYBRIDS, only_modules, open_rows
from test_modules import KNOWN

from runtime.kernels import library
from runtime.kernels.start import speed_up
from server import core
from server.options import Options


@pytest.mark.parametrize(("shorten", "left"), [
    (lambda cache, row: cache.truncate(row, 7), 7),
    (lambda cache, row: cache.keep(row, 3, [0]), 7),  # d1 of [pending, d1, d2, d3]
    (lambda cache, row: cache.keep(row, 3, range(3)), 9),
])  # fmt: skip
def test_truncating_touches_no_tensor(demo_engine, shorten, left):
    """Keeping the beginning of a chain touches none, either."""
    cache = demo_engine.target.cache
    with open_rows(demo_engine.target, [*range(5, 14)]) as (row,):
        keys = cache.layers[0].keys
        before = keys.clone()
        shorten(cache, row)
        assert cache.lengths[row] == left
        assert cache.layers[0].keys is keys and torch.equal(keys, before)


@torch.inference_mode()
def recompute(oracle, text):
    """transformers' logits [t, V], and its states behind the first block and the last norm."""
    output = oracle(torch.tensor([text]), output_hidden_states=True)
    return output.logits[0], {i: output.hidden_states[j][0] for i, j in ((0, 1), (-1, -1))}


def assert_same(ours, theirs, roundings=1):
    """In fp32 within 1e-5 of the largest one: these weights are large, so that the text matters."""
    atol = 1e-5 * roundings * max(1.0, float(theirs.abs().max()))
    torch.testing.assert_close(ours, theirs.to(ours.dtype), atol=atol, rtol=0)


PATHS = [  # transformers' modules; those with the kernels' sums; blocks in C, where there are any
    *product(("llama", "mistral", "gemma2", "qwen2", "gpt_oss", *HYBRIDS), ("plain", "modules")),
    *((family, "modules") for family in ("gpt_neox", "opt", "gemma3_text", "gpt2")),
    *((family, "compiled") for family in sorted(KNOWN | {"qwen3_5_text"})),
]


@pytest.mark.parametrize(("family", "path"), PATHS)
def test_ragged_rows_with_random_truncation_equal_a_recompute(family, path, tiny_folder, reference):
    """Logits of three rows of unequal length, and hidden states behind the layers asked for."""
    folder, roundings = tiny_folder(family), 10 if family in HYBRIDS else 1
    target = core.load_model(str(folder), Options(max_running=4, kernels=path != "plain"))
    with only_modules() if path == "modules" else nullcontext():
        speed_up(target)
    if library.why_not() is None and path != "plain":
        assert target.compiled.is_compiled == (path == "compiled")
    # Where both sides round, each CPU makes another difference.
    oracle = deepcopy(reference(folder)).double()
    oracle.set_experts_implementation("eager")  # torch multiplies no groups of float64
    random = Random(1)
    rows = [target.cache.open_row() for _ in range(3)]
    rows = [rows[2], rows[0], rows[1]]  # not in order: the cache must gather them
    texts = {row: [] for row in rows}
    for cycle in range(6):
        batch = rows if cycle % 3 else rows[:1]
        sizes = [random.randrange(1, 9 if cycle else 30) for _ in batch]
        fed = [[random.randrange(1, 4096) for _ in range(n)] for n in sizes]
        output = target.forward(batch, fed, sizes, layers=(0, -1))
        assert output.hidden.keys() == {0, -1}
        for b, (row, size) in enumerate(zip(batch, sizes, strict=True)):
            whole = texts[row] + fed[b]
            assert target.cache.lengths[row] == len(whole)
            logits, hidden = recompute(oracle, whole)
            assert_same(output.logits[b], logits[-size:], roundings)
            for layer, states in hidden.items():
                assert_same(output.hidden[layer][b], states[-size:], roundings)
            texts[row] = whole[: len(texts[row]) + random.randint(1, size)]
            target.cache.truncate(row, len(texts[row]))


def test_what_a_cache_cannot_hold_is_refused():
    cache = core.SlotCache(num_layers=1, num_rows=1, max_length=8, device="cpu")
    row = cache.open_row()
    for refused, message in (
        (lambda: cache.truncate(row, 1), "cannot truncate 0 cached tokens to 1"),
        (lambda: cache.place([row], [9]), "9 tokens do not fit a KV cache of 8"),
        (cache.open_row, "all 1 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            refused()


@torch.inference_mode()
def test_a_forward_that_fails_leaves_no_nan_to_the_next_request(demo_engine):
    """It may have written before it failed; a slot's next owner would read 0 · NaN."""
    target = demo_engine.target
    with open_rows(target, [5], [6]) as rows:  # closed, the second one moves to the first's slot
        target.cache.place(rows, [4, 4])
        for layer in target.cache.layers:
            layer.values[:2, :, :3] = float("nan")
        target.forward(rows, [[6], [7]], [1, 1])  # without advance, and not as far
    assert all(layer.values.isfinite().all() for layer in target.cache.layers)
