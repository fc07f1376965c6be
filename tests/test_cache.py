"""The KV cache: rows of their own length, O(1) truncation, exact on every family of attention."""

import pytest
import speculative_decoding as core
import torch
from conftest import FAMILIES, make_exact

from fastpath.forward import speed_up


def tiny_model(folder, num_rows=4):
    return core.load_model(str(folder), core.Options(max_running=num_rows))


@pytest.mark.parametrize("fast", [False, True], ids=["modules", "fast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_with_random_truncation_equal_a_cache_free_recompute(
    family, fast, tiny_folder, reference
):
    """Logits and hidden states of three rows of unequal length, in fp32.

    Within 1e-5 of the largest one: these weights are large, so that the text matters.
    """

    def assert_same(ours, theirs):
        atol = 1e-5 * max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)

    target, oracle = tiny_model(tiny_folder(family)), reference(tiny_folder(family))
    if fast:
        speed_up(target)
        make_exact(target)  # pads: they must not show either
    random = torch.Generator().manual_seed(1)
    draw = lambda high: int(torch.randint(1, high, (1,), generator=random))  # noqa: E731
    rows = [target.cache.open_row() for _ in range(3)]
    rows = [rows[2], rows[0], rows[1]]  # not in order: the cache must gather them
    texts = {row: [] for row in rows}
    for cycle in range(8):
        batch = rows if cycle % 3 else rows[:1]
        fed = [
            torch.randint(1, 4096, (draw(9 if cycle else 30),), generator=random).tolist()
            for _ in batch
        ]
        output = target.forward(batch, fed, [len(new) for new in fed], layers=(-1,))
        for b, row in enumerate(batch):
            whole = texts[row] + fed[b]
            with torch.inference_mode():
                expected = oracle(torch.tensor([whole]), output_hidden_states=True)
            count = len(fed[b])
            assert_same(output.logits[b], expected.logits[0, -count:])
            assert_same(output.hidden[-1][b], expected.hidden_states[-1][0, -count:])
            texts[row] = whole[: len(texts[row]) + draw(count + 1)]
            target.cache.truncate(row, len(texts[row]))


def test_truncating_touches_no_tensor(demo_engine):
    cache = demo_engine.target.cache
    row = cache.open_row()
    demo_engine.target.forward([row], [[5, 6, 7, 8]], [1])
    keys = cache.layers[0].keys
    before = keys.clone()
    cache.truncate(row, 1)
    assert cache.lengths[row] == 1
    assert cache.layers[0].keys is keys and torch.equal(keys, before)
    cache.close_row(row)


def test_a_row_cannot_be_truncated_to_more_than_it_holds(demo_engine):
    cache = demo_engine.target.cache
    row = cache.open_row()
    with pytest.raises(ValueError, match="cannot truncate 0 cached tokens to 1"):
        cache.truncate(row, 1)
    cache.close_row(row)


def test_a_row_that_would_outgrow_the_cache_is_refused_before_anything_is_written(tiny_folder):
    target = tiny_model(tiny_folder("llama"))
    row = target.cache.open_row()
    target.forward([row], [[1] * 250], [1])
    with pytest.raises(ValueError, match="257 tokens do not fit a KV cache of 256"):
        target.forward([row], [[1] * 7], [1])
    assert target.cache.lengths[row] == 250


def test_rows_run_out_and_come_back(tiny_folder):
    cache = tiny_model(tiny_folder("llama"), num_rows=2).cache
    rows = [cache.open_row(), cache.open_row()]
    with pytest.raises(ValueError, match="all 2 rows"):
        cache.open_row()
    cache.close_row(rows[0])
    assert cache.open_row() == rows[0]


@torch.inference_mode()
def test_a_forward_that_fails_leaves_no_nan_to_the_next_request(demo_engine):
    """It may have written before it failed; the slot's next owner would read 0 · NaN."""
    target = demo_engine.target
    row = target.cache.open_row()
    target.forward([row], [[5]], [1])
    target.cache.place([row], [4])
    for layer in target.cache.layers:
        layer.values[0, :, 2] = float("nan")
    target.cache.close_row(row)  # without advance
    assert all(layer.values.isfinite().all() for layer in target.cache.layers)
