"""Blocks in C, and modules with the kernels' sums, compute what transformers' modules compute."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest
import speculative_decoding as core
import torch
import transformers
from conftest import FAMILIES, WAYS, run
from families import served_texts
from test_kernels import needs_compiler
from torch import nn
from transformers import AutoModelForCausalLM

from kernels import decoder
from kernels.decoder import Rows, decoder_of
from kernels.forward import lines_of
from kernels.modules import FlatPlace, attention_forward
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


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_original_weights_are_freed(family):
    model = random_model(family)
    original = sum(p.numel() for p in model.parameters())
    speed_up(model, 64).release(model)
    gc.collect()
    kept = sum(p.numel() for p in model.parameters())
    positions = model.config.n_positions * model.config.n_embd if family == "gpt2" else 0
    assert kept < positions + 0.02 * original


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


# --------------------------------------------------------------- modules with the kernels' sums
def flat(texts):
    """A place of `texts`: (slot, begin, tokens, parents of those that are a draft) each."""
    where, counts = Rows(), [count for _, _, count, _ in texts]
    for slot, begin, count, parents in texts:
        where.tree(slot, begin, lines_of(parents, count))
    slots, ends = [text[0] for text in texts], [begin + count for _, begin, count, _ in texts]
    place = SimpleNamespace(slots=slots, counts=counts, ends=ends, end=max(where.places) + 1)
    return FlatPlace(place, where)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "value_width", "softcap", "has_sinks"),
    [(4, 4, 16, 16, None, False), (6, 2, 24, 12, 5.0, True), (3, 1, 10, 40, None, True)],
)
def test_attention_of_modules_is_attention(
    heads, kv_heads, width, value_width, softcap, has_sinks, window, dtype
):
    """Texts of unequal lengths side by side, one of which branches; against sums in doubles."""
    random = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn(3, kv_heads, 700, size, generator=random).to(dtype)
        for size in (width, value_width)
    )
    place = flat([(2, 600, 3, []), (0, 0, 5, []), (1, 20, 4, [-1, -1, 0])])
    count = place.rows.shape[1]
    query = torch.randn(1, heads, count, width, generator=random).to(dtype)
    sinks = torch.randn(heads, generator=random) if has_sinks else None
    mask = place.mask(dtype, window)
    given = query, keys[:, :, :640], values[:, :, :640], mask, 0.3, softcap, sinks
    actual = attention_forward(None, *given)[0][0].double()
    assert actual.shape == (count, heads, value_width)
    rounding = 0.01 if dtype == torch.bfloat16 else 1e-5
    for i, (slot, position, _) in enumerate(place.rows.T.tolist()):
        seen = list(range(position + 1))
        if slot == 1:  # the last token of the tree follows the second one
            seen = [*range(20), *[[20], [20, 21], [20, 22], [20, 21, 23]][i - 8]]
        seen = seen[-window:] if window else seen
        own, other = (
            each[slot][:, seen].double().repeat_interleave(heads // kv_heads, 0)
            for each in (keys, values)
        )
        scores = (own @ query[0, :, i, :, None].double())[..., 0] * 0.3  # [heads, seen]
        scores = scores if softcap is None else (scores / softcap).tanh() * softcap
        sink = [] if sinks is None else [sinks[:, None].double()]
        weights = torch.cat([scores, *sink], -1).softmax(-1)[:, : len(seen)]
        expected = (weights[:, None] @ other)[:, 0]
        torch.testing.assert_close(actual[i], expected, rtol=rounding, atol=rounding)


@needs_compiler
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


# --------------------------------------------------------------------- the core without all this
@pytest.mark.parametrize("drafter", ["ngram", "draft_model", "mtp"])
def test_kernels_change_no_token(demo_engine, slow_engine, prompts, plain, drafter):
    assert slow_engine.target.fast is None and slow_engine.panel.drafters["mtp"]._kernels == []
    assert demo_engine.target.fast.is_compiled and demo_engine.draft_model.fast.is_compiled
    assert demo_engine.panel.drafters["mtp"]._kernels
    for name in ("code_class", "repetitive_letters"):
        fast, events = run(demo_engine, prompts[name], max_tokens=24, drafter=drafter)
        other, others = run(slow_engine, prompts[name], max_tokens=24, drafter=drafter)
        assert fast.output == other.output == plain(prompts[name], 24)
        assert [e["proposals"] for e in events] == [e["proposals"] for e in others]


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text"])
def test_the_core_alone_is_lossless_and_says_that_it_is_not_exact(family, tiny_folder):
    """Alone, and in a batch of unequal texts, all of them longer than the family's windows."""
    models = {"model": str(tiny_folder(family)), "draft_model": str(tiny_folder("llama:1"))}
    options = core.Options(**models, max_running=4, fixed_k=True)
    fast, engine = core.load_engine(options), core.load_engine(replace(options, kernels=False))
    report = engine.target.report
    assert not report.is_exact and "transformers' modules" in report.doubt
    greedy, sampled = WAYS.values()
    requests = [
        core.Request([5, 6, 7] * 6, 20, "ngram", **greedy),
        core.Request([*range(20, 60)], 16, "draft_model", **sampled),
        core.Request([9, 8] * 10, 20, None, **sampled),
        core.Request([*range(60, 74)] * 2, 24, "draft_model", **greedy),
    ]
    for request, text in zip(requests, served_texts(engine, requests), strict=True):
        way = {"sampling": request.sampling, "seed": request.seed}
        given = request.prompt, request.max_tokens, set()
        assert text == core.plain_decode(engine.target, *given, **way)
        assert text == served_texts(engine, [request])[0] == served_texts(fast, [request])[0]
    assert engine.totals.by_drafter["draft_model"].num_draft_tokens > 20


@pytest.mark.parametrize("share", [1e-6, 1e-3])
def test_what_roundings_do_to_a_model_is_told_from_a_mistake(monkeypatch, share):
    model, run = random_model("llama"), decoder._run

    def moved(*given):
        values, states = run(*given)
        return values + share * values.abs().max(), states

    monkeypatch.setattr(decoder, "_run", moved)
    assert bool(speed_up(model, 64)) == (share < 1e-5)
