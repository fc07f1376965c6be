"""Blocks in C, and modules with the kernels' sums, compute what transformers' modules compute.

A model of plain blocks runs in C as a whole, and any other in modules. Each is compared with
transformers at its start, so that a config that is read wrongly is refused.
"""

from types import SimpleNamespace

import pytest
import torch
from conftest import load, needs_compiler
from families import save_small
from torch import nn

from runtime.kernels import reading
from runtime.kernels.modules import attention_forward
from runtime.kernels.patches import pack

KNOWN = {
    "llama", "qwen3", "mistral", "qwen2", "granite",
    "gemma2", "gemma3_text", "phi3", "olmo2", "gpt2", "smollm3",
}  # fmt: skip
# What the names of the parts do not tell: multipliers, rotations, biases, windows.
CHANGES = [
    *((family, {}) for family in ("gpt_neox", "opt", "gpt_oss")),
    ("granite", {"residual_multiplier": 0.2, "embedding_multiplier": 12.0}),
    ("granite", {"logits_scaling": 8.0, "attention_multiplier": 0.01}),
    ("llama", {"hidden_act": "gelu", "attention_bias": True}),
    ("llama", {"sliding_window": 4, "use_sliding_window": False}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    ("ministral3", {"rope_parameters": {  # queries beyond the context of its first training
        "rope_type": "yarn", "factor": 16.0, "rope_theta": 1e4, "llama_4_scaling_beta": 0.5,
        "original_max_position_embeddings": 16,
    }}),
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(("family", "changes"), CHANGES, ids=str)
def test_plain_blocks_run_in_c_and_others_in_modules(family, changes, tmp_path):
    """With what their families have usually they are in test_cache.py."""
    save_small(family, tmp_path, **changes)
    assert load(tmp_path, max_running=2).target.compiled.is_compiled == (family in KNOWN)


@needs_compiler
def test_code_that_computes_with_a_packed_weight_itself_says_so():
    pack(layer := nn.Linear(16, 16))
    with pytest.raises(AttributeError, match=r"computes with a weight itself \(.float\)"):
        layer.weight.float()


@needs_compiler
@pytest.mark.parametrize("share", [1e-6, 1e-3])
def test_a_mistake_is_larger_than_what_roundings_do_to_a_model(tiny_folder, monkeypatch, share):
    run = reading._run

    def moved(*inputs):
        values, states = run(*inputs)
        return values + share * values.abs().max(), states

    monkeypatch.setattr(reading, "_run", moved)
    assert load(tiny_folder("llama"), max_running=2).target.compiled.is_compiled == (share < 1e-5)


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
