"""Blocks in C, and modules with the kernels' sums, compute what transformers' modules compute."""

from types import SimpleNamespace

import pytest
import speculative_decoding as core
import torch
import transformers
from conftest import FAMILIES
from test_batching import together
from torch import nn
from transformers import AutoModelForCausalLM

from kernels import decoder
from kernels.decoder import Rows, decoder_of
from kernels.modules import attention_forward
from models.structure import examine

KNOWN = {
    "llama", "qwen3", "mistral", "qwen2", "granite",
    "gemma2", "gemma3_text", "phi3", "olmo2", "gpt2", "smollm3",
}  # fmt: skip


def random_model(family, **changes):
    """An untrained model of the family whose weights are all random, norms and biases too."""
    torch.manual_seed(0)
    fields = FAMILIES.get(family, FAMILIES["llama"]) | changes
    config = transformers.AutoConfig.for_model(family, **fields)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def speed_up(model, length):
    return decoder_of(model, length, examine(model, length).windows)


def logits(decoder, ids):
    """Of a text's tokens ids [T]."""
    decoder.attach_zeros(len(ids))
    rows = Rows()
    rows.chain(0, 0, len(ids))
    rows.ids, rows.wanted = ids.tolist(), list(range(len(ids)))
    return decoder(rows)[0]


# What the names of the parts do not tell: multipliers, skipped rotations, biases, windows.
CHANGES = [
    ("granite", {"residual_multiplier": 0.2}),
    ("granite", {"embedding_multiplier": 12.0}),
    ("granite", {"logits_scaling": 8.0}),
    ("granite", {"attention_multiplier": 0.01}),
    ("smollm3", {"no_rope_layer_interval": 2}),
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"attention_bias": True}),
    ("qwen3", {"head_dim": 32}),
    ("llama", {"sliding_window": 4, "use_sliding_window": False}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
]


@pytest.mark.parametrize(
    ("family", "changes"), [*((family, {}) for family in FAMILIES), *CHANGES], ids=str
)
def test_plain_blocks_run_in_c_and_others_stay_what_they_are(family, changes):
    model = random_model(family, **changes)
    ids = torch.randint(4096, (12,), generator=torch.Generator().manual_seed(1))
    expected = model(ids[None]).logits[0].detach()
    found = speed_up(model, 64)
    assert changes or bool(found) == (family in KNOWN)
    if found:
        torch.testing.assert_close(logits(found, ids), expected, rtol=1e-4, atol=1e-3)
    # The modules go on: as they were, or with the same panels.
    is_packed = any(hasattr(module, "panels") for module in model.modules())
    tolerance = {"rtol": 1e-4, "atol": 1e-3} if is_packed else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(model(ids[None]).logits[0], expected, **tolerance)


def test_what_depends_on_the_position_or_the_length_is_left_to_the_module():
    """ministral3 scales queries beyond the context it was first trained on; dynamic rotations."""
    scaling = {
        "rope_type": "yarn", "factor": 16.0, "rope_theta": 1e4, "llama_4_scaling_beta": 0.5,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    assert not speed_up(random_model("ministral3", head_dim=8, rope_parameters=scaling), 256)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert not speed_up(random_model("llama", rope_parameters=dynamic), 64)


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


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text"])
def test_the_core_alone_is_lossless_and_says_that_it_is_not_exact(family, tiny_folder, way):
    """In a batch of unequal texts, all of them longer than the family's windows."""
    engine = core.load_engine(
        core.Options(
            model=str(tiny_folder(family)), draft_model=str(tiny_folder("llama:1")), kernels=False,
            max_running=4, fixed_k=True,
        )
    )  # fmt: skip
    report = engine.target.report
    assert not report.is_exact and "transformers' modules" in report.doubt
    requests = [
        core.Request([5, 6, 7] * 6, 20, "ngram", **way),
        core.Request([*range(20, 60)], 16, "draft_model", **way),
        core.Request([9, 8] * 10, 20, None, **way),
    ]
    for request, s in zip(requests, together(engine, requests), strict=True):
        assert s.output == core.plain_decode(
            engine.target, request.prompt, request.max_tokens, engine.eos_ids, **way
        )
    assert engine.totals.by_drafter["draft_model"].num_draft_tokens > 10


@pytest.mark.parametrize("share", [1e-6, 1e-3])
def test_what_roundings_do_to_a_model_is_told_from_a_mistake(monkeypatch, share):
    model, run = random_model("llama"), decoder._run

    def moved(*given):
        values, states = run(*given)
        return values + share * values.abs().max(), states

    monkeypatch.setattr(decoder, "_run", moved)
    assert bool(speed_up(model, 64)) == (share < 1e-5)
