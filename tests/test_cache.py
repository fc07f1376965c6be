"""What a row of the KV cache forgets leaves no trace: a truncated row is as one that never read it.

Rows have lengths of their own, so rejected tokens cost a change of the length, and no tensor is
touched. It holds in every family of attention, against a recompute without a cache.

A model of plain blocks runs in C as a whole, and any other in modules with the kernels' sums. Each
is compared with transformers at its start, so that a config that is read wrongly is refused.
"""

from contextlib import nullcontext
from copy import deepcopy
from itertools import product
from random import Random
from types import SimpleNamespace

import pytest
import torch
from conftest import HYBRIDS, load, needs_compiler, only_modules, open_rows
from families import save_small
from gguf_files import Q8_0, TINY, write
from torch import nn

from runtime.kernels import library, reading
from runtime.kernels.modules import attention_forward
from runtime.kernels.patches import pack
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


KNOWN = {
    "llama", "qwen3", "mistral", "qwen2", "granite",
    "gemma2", "gemma3_text", "phi3", "olmo2", "gpt2", "smollm3",
}  # fmt: skip
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


# ------------------------------------------------------------- in C as a whole, or in modules
# What the names of the parts do not tell: multipliers, rotations, biases, windows.
CHANGES = [
    *((family, {}) for family in ("gpt_neox", "opt", "gpt_oss")),
    ("granite", {"residual_multiplier": 0.2, "embedding_multiplier": 12.0}),
    ("granite", {"logits_scaling": 8.0, "attention_multiplier": 0.01}),
    ("llama", {"hidden_act": "gelu", "attention_bias": True}),
    ("llama", {"sliding_window": 4}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    ("ministral3", {"rope_parameters": {  # queries beyond the context of its first training
        "rope_type": "yarn", "factor": 16.0, "rope_theta": 1e4, "llama_4_scaling_beta": 0.5,
        "original_max_position_embeddings": 16,
    }}),
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(("family", "changes"), CHANGES, ids=str)
def test_plain_blocks_run_in_c_and_others_in_modules(family, changes, tmp_path):
    """With what their families have usually they are among the PATHS above."""
    save_small(family, tmp_path, **changes)
    assert load(tmp_path, max_running=2).target.compiled.is_compiled == (family in KNOWN)


@needs_compiler
def test_code_that_computes_with_a_packed_weight_itself_says_so():
    pack(layer := nn.Linear(16, 16))
    with pytest.raises(AttributeError, match=r"computes with a weight itself \(.float\)"):
        layer.weight.float()


@needs_compiler
@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize("share", [1e-6, 1e-3])
def test_a_mistake_is_larger_than_what_roundings_do_to_a_model(
    tiny_folder, tmp_path, monkeypatch, share, is_file
):
    """With it the modules run by themselves, at the next start, too."""
    run, path = reading._run, tmp_path / "a.gguf" if is_file else tiny_folder("llama")

    def moved(*inputs):
        logits, states = run(*inputs)
        for values in (logits, *states.values()):
            values += share * values.abs().max()
        return logits, states

    if is_file:
        write(path, TINY, Q8_0)
    monkeypatch.setattr(reading, "_run", moved)
    for _ in range(2):
        assert load(path, max_running=2).target.compiled.is_compiled == (share < 1e-5)


def test_a_mask_that_is_not_ours_gets_transformers_attention_or_none():
    """An MTP head of modules brings a mask of its own; soft caps are not known there."""
    query, key, value = torch.randn(3, 2, 4, 5, 16, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(2, 1, 5, 5)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, mask)
    module = SimpleNamespace(is_causal=True, num_key_value_groups=1)
    actual, _ = attention_forward(module, query, key, value, mask)
    torch.testing.assert_close(actual, expected.transpose(1, 2))
    with pytest.raises(TypeError, match="not known here"):
        attention_forward(module, query, key, value, mask, softcap=5.0)
