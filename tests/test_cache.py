"""The KV cache: rows of their own length, O(1) truncation, exact on every family of attention."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import speculative_decoding as core
import torch
from conftest import FAMILIES, HYBRIDS, only_modules
from test_modules import KNOWN

from kernels.start import speed_up
from serving.options import Options


def tiny_model(folder, num_rows=4, way="plain"):
    options = Options(max_running=num_rows, kernels=way != "plain")
    target = core.load_model(str(folder), options)
    with only_modules() if way == "modules" else nullcontext():
        speed_up(target)
    return target


@torch.inference_mode()
def recompute(oracle, text):
    """transformers' own: logits [t, V], and the states behind the first block and the last norm."""
    output = oracle(torch.tensor([text]), output_hidden_states=True)
    return output.logits[0], {i: output.hidden_states[j][0] for i, j in ((0, 1), (-1, -1))}


def assert_same(ours, theirs, roundings=1):
    """In fp32 within 1e-5 of the largest one: these weights are large, so that the text matters."""
    atol = 1e-5 * roundings * max(1.0, float(theirs.abs().max()))
    torch.testing.assert_close(ours, theirs.to(ours.dtype), atol=atol, rtol=0)


WAYS = {  # the others run in modules with the kernels' sums, if not plainly
    family: ("plain", "modules", *(["compiled"] if family in KNOWN | {"qwen3_5_text"} else ()))
    for family in FAMILIES | HYBRIDS
}


@pytest.mark.parametrize(
    ("family", "way"), [(family, way) for family, ways in WAYS.items() for way in ways]
)
def test_ragged_rows_with_random_truncation_equal_a_cache_free_recompute(
    family, way, tiny_folder, reference
):
    """Logits of three rows of unequal length, and hidden states behind the layers asked for.

    They are recomputed in float64: where both sides round, each CPU makes another difference.
    """
    folder = tiny_folder(family)
    roundings = 10 if family in HYBRIDS else 1
    target, oracle = tiny_model(folder, way=way), deepcopy(reference(folder)).double()
    oracle.set_experts_implementation("eager")  # torch multiplies no groups of float64
    random = torch.Generator().manual_seed(1)
    draw = lambda high: int(torch.randint(1, high, (1,), generator=random))  # noqa: E731
    rows = [target.cache.open_row() for _ in range(3)]
    rows = [rows[2], rows[0], rows[1]]  # not in order: the cache must gather them
    texts = {row: [] for row in rows}
    for cycle in range(6):
        batch = rows if cycle % 3 else rows[:1]
        sizes = [draw(9 if cycle else 30) for _ in batch]
        fed = [torch.randint(1, 4096, (n,), generator=random).tolist() for n in sizes]
        output = target.forward(batch, fed, sizes, layers=(0, -1))
        assert output.hidden.keys() == {0, -1}
        for b, (row, size) in enumerate(zip(batch, sizes, strict=True)):
            whole = texts[row] + fed[b]
            assert target.cache.lengths[row] == len(whole)
            logits, hidden = recompute(oracle, whole)
            assert_same(output.logits[b], logits[-size:], roundings)
            for layer, states in hidden.items():
                assert_same(output.hidden[layer][b], states[-size:], roundings)
            texts[row] = whole[: len(texts[row]) + draw(size + 1)]
            target.cache.truncate(row, len(texts[row]))


@pytest.mark.parametrize(
    ("shorten", "left"),
    [
        (lambda cache, row: cache.truncate(row, 7), 7),
        (lambda cache, row: cache.keep(row, 3, [0]), 7),  # d1 of [pending, d1, d2, d3]
        (lambda cache, row: cache.keep(row, 3, range(0)), 6),
        (lambda cache, row: cache.keep(row, 3, range(3)), 9),
        (lambda cache, row: cache.keep(row, 0, range(0)), 9),
    ],
)
def test_truncating_touches_no_tensor(demo_engine, shorten, left):
    """Nor does keeping the beginning of a chain."""
    cache = demo_engine.target.cache
    row = cache.open_row()
    demo_engine.target.forward([row], [[*range(5, 14)]], [1])
    keys = cache.layers[0].keys
    before = keys.clone()
    shorten(cache, row)
    assert cache.lengths[row] == left
    assert cache.layers[0].keys is keys and torch.equal(keys, before)
    cache.close_row(row)


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
    rows = [target.cache.open_row() for _ in range(2)]
    target.forward(rows, [[5], [6]], [1, 1])
    target.cache.place(rows, [4, 4])
    for layer in target.cache.layers:
        layer.values[:2, :, :3] = float("nan")
    target.forward(rows, [[6], [7]], [1, 1])  # without advance, and not as far
    for row in rows:  # the second one is moved to the first one's slot
        target.cache.close_row(row)
    assert all(layer.values.isfinite().all() for layer in target.cache.layers)
