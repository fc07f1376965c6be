"""The fast path computes what transformers' modules compute, and steps aside where it would not."""

import gc

import pytest
import speculative_decoding as core
import torch
import transformers
from conftest import FAMILIES, run
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from fastpath import linear
from fastpath.attention import CausalMasks, attend, grouped_mask
from fastpath.block import causal_mask
from fastpath.decoder import speed_up
from fastpath.linear import PackedLinear, pack

needs_packing = pytest.mark.skipif(
    not linear.can_pack(torch.float32), reason="this CPU has no packed linear layers"
)
FUSED = {"llama", "qwen3", "mistral", "qwen2", "granite"}


def random_model(family, **changes):
    """An untrained model of the family whose weights are all random, norms and biases too."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family] | changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return model


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_computes_what_it_was_packed_from(dtype, bias):
    layer = nn.Linear(96, 40, bias=bias, dtype=dtype)
    module, x = nn.ModuleList([layer]), torch.randn(2, 3, 96, dtype=dtype)
    expected = layer(x)
    pack(module)
    assert type(module[0]) is PackedLinear and list(module.parameters()) == []
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(module[0](x), expected, rtol=tolerance, atol=tolerance)


@needs_packing
def test_a_transposed_layer_is_packed_as_well():
    module, x = nn.ModuleList([Conv1D(40, 96)]), torch.randn(2, 3, 96)
    expected = module[0](x)
    pack(module)
    assert type(module[0]) is PackedLinear
    torch.testing.assert_close(module[0](x), expected, rtol=1e-5, atol=1e-6)


@needs_packing
@pytest.mark.parametrize("width", [192, 3072])
def test_from_two_rows_on_a_packed_row_has_the_same_bits_in_any_company(width):
    module, x = nn.ModuleList([nn.Linear(width, 256, bias=False)]), torch.randn(300, width)
    pack(module)
    whole = module[0](x)
    for count in (2, 3, 6, 48, 255):
        assert torch.equal(module[0](x[:count]), whole[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_of_all_lengths_need_code_for_a_few_numbers_of_rows(dtype, monkeypatch):
    """Each number of rows costs memory for good; the pads change no bit of the result."""
    if not linear.can_pack(dtype):
        pytest.skip("this machine packs no such weights")
    torch.manual_seed(0)
    weight, bias = torch.randn(64, 32, dtype=dtype), torch.randn(64, dtype=dtype)
    compute = linear.compute_with(weight, bias)
    for count in (1, 16, 17, 63, 65, 99, 250):
        x, residual = torch.randn(1, count, 32, dtype=dtype), torch.randn(1, count, 64, dtype=dtype)
        for more in (None, residual):
            padded = compute(x, more)
            with monkeypatch.context() as patch:
                patch.setattr(linear, "rows_to_run", lambda num_rows: num_rows)
                assert torch.equal(padded, compute(x, more)) and padded.shape == (1, count, 64)
    numbers = [linear.rows_to_run(count) for count in range(1, 257)]
    assert len(set(numbers)) == 16 + 12 + 24
    assert all(0 <= run - count < 8 for count, run in enumerate(numbers, 1))


@needs_packing
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_original_weights_are_freed(family):
    model = random_model(family)
    original = sum(p.numel() for p in model.parameters())
    speed_up(model, 64)
    gc.collect()
    kept = sum(p.numel() for p in model.parameters())
    embeddings = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    assert kept < embeddings + 0.02 * original


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_blocks_are_fused_and_others_are_not(family):
    model = random_model(family)
    ids = torch.randint(4096, (2, 9), generator=torch.Generator().manual_seed(1))
    expected = model(ids).logits
    fused = speed_up(model, 64)
    assert bool(fused) == (family in FUSED)
    # The model itself goes on being one of transformers'.
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
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
    ],
    ids=str,
)
def test_what_the_names_of_the_parts_do_not_tell_changes_no_result(family, changes):
    """Multipliers, skipped rotations, biases: computed rightly, or left to the module."""
    model = random_model(family, **changes)
    ids = torch.randint(4096, (1, 12), generator=torch.Generator().manual_seed(2))
    expected = model(ids).logits
    fused = speed_up(model, 64)
    if fused:
        actual, _ = fused(ids, torch.arange(12)[None], 0, 12, None, 12)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)
    if "multiplier" in str(changes) and "attention" not in str(changes) or "logits" in str(changes):
        assert fused is None
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-3)


def test_a_family_that_scales_by_the_position_is_left_to_the_module():
    """ministral3 scales queries beyond the context it was first trained on."""
    rope = {
        "rope_type": "yarn", "factor": 16.0, "rope_theta": 1e4, "llama_4_scaling_beta": 0.5,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "ministral3", **FAMILIES["llama"], head_dim=8, rope_parameters=rope
    )
    assert speed_up(AutoModelForCausalLM.from_config(config).eval(), 256) is None


def test_rotations_that_depend_on_the_length_are_left_to_the_module():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert speed_up(random_model("llama", rope_parameters=rope), 64) is None


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_grouped_attention_is_attention(heads, kv_heads, count):
    random = torch.Generator().manual_seed(0)
    query = torch.randn(2, heads, count, 16, generator=random)
    key, value = torch.randn(2, 2, kv_heads, 70, 16, generator=random)
    mask = causal_mask(count, 70, query)
    groups = heads // kv_heads
    wide = [tensor.repeat_interleave(groups, 1) for tensor in (key, value)]
    scores = query @ wide[0].transpose(2, 3) * 0.3 + mask
    expected = (scores.softmax(-1) @ wide[1]).transpose(1, 2).flatten(2)
    actual = attend(query.transpose(1, 2), key, value, grouped_mask(mask, groups), scaling=0.3)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("groups", [1, 3])
def test_masks_from_the_table_are_the_ones_that_are_computed(groups, window):
    masks = CausalMasks(groups, 64, window, torch.float32, torch.device("cpu"))
    for start, count in ((0, 1), (5, 6), (30, 32), (58, 6), (63, 1)):
        positions = torch.arange(start, start + count)[None]
        for kv_length in (start + count, 64):
            rows = count * groups
            tabulated = masks.of(positions, start, kv_length)[:, :, :rows]
            computed = masks.of(positions, None, kv_length)
            assert torch.equal(tabulated, computed[:, :, :rows])
            seen = [
                key <= start + i and (window is None or key > start + i - window)
                for i in range(count)
                for _ in range(groups)
                for key in range(kv_length)
            ]
            assert (tabulated.flatten() == 0).tolist() == seen
            assert computed.shape[2] % 8 == tabulated.shape[1] - 1 == 0


def test_without_packed_layers_all_still_runs(monkeypatch, tiny_folder, prompts):
    """As on another CPU: the same tokens, from layers that are joined but not packed."""
    options = core.Options(model=str(tiny_folder("llama")), drafter="ngram")
    expected, _ = run(core.load_engine(options), prompts["hard_prose"], max_tokens=30)
    monkeypatch.setattr(linear, "can_pack", lambda *_: False)
    engine = core.load_engine(options)
    assert engine.target._fused
    assert run(engine, prompts["hard_prose"], max_tokens=30)[0].output == expected.output


@pytest.mark.parametrize("drafter", [None, "ngram", "draft_model", "mtp"])
def test_the_fast_path_changes_no_token(demo_engine, prompts, drafter):
    slow = core.load_engine(core.Options(fastpath=False, bitwise=False, fixed_k=True))
    assert slow.target._fused is None and slow.drafters["mtp"]._fused is None
    assert demo_engine.target._fused and demo_engine.drafters["mtp"]._fused
    for name in ("code_class", "repetitive_letters", "easy_json"):
        fields = {"max_tokens": 40, "drafter": drafter}
        fast, events = run(demo_engine, prompts[name], **fields)
        other, others = run(slow, prompts[name], **fields)
        assert fast.output == other.output
        assert [e["proposals"] for e in events] == [e["proposals"] for e in others]


# ------------------------------------------------------------------------------- equal bits


@needs_packing
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["demo", *FAMILIES])
def test_logits_are_the_same_bits_alone_verified_batched_and_chunked(family, dtype, tiny_folder):
    """The self-test's claim on other texts: 16 decoded tokens against verifies and batches.

    Mixtures of experts are not exact in float32 (their layers are not packed), and say so.
    """
    model = core.Options().model if family == "demo" else str(tiny_folder(family))
    target = core.load_model(model, core.Options(dtype=dtype, max_running=6))
    target.speed_up()
    if not target.make_exact():
        assert family == "gpt_oss" and dtype == "float32"
        return
    random = torch.Generator().manual_seed(5)
    text = torch.randint(4096, (61,), generator=random).tolist()
    one, two, *others = [target.cache.open_row() for _ in range(6)]
    target.forward([one], [text[:45]], [1])
    alone = [target.forward([one], [[token]], [1]).logits[0][0] for token in text[45:]]
    for chunk in (text[:13], text[13:14], text[14:45]):
        target.forward([two], [chunk], [1])
    for i, other in enumerate(others):  # the longest sees more than two steps of keys
        length = min(150 * i + 1, target.max_length - 30)
        fed = torch.randint(4096, (length,), generator=random).tolist()
        target.forward([other], [fed], [1])
    position = 45
    for count, neighbours in ((1, others), (6, others), (2, []), (5, others[:2]), (2, others)):
        rows = [two, *neighbours]
        fed = [text[position : position + count]]
        fed += [text[: 1 + (3 * i + count) % 6] for i in range(len(neighbours))]
        logits = target.forward(rows, fed, [len(new) for new in fed]).logits[0]
        for i in range(count):
            assert torch.equal(logits[i], alone[position - 45 + i]), (family, position, i)
        position += count
    assert position == 61


def test_what_is_not_exact_is_said_to_be_not(tiny_folder, monkeypatch):
    """A model whose logits depend on the batch, in the last bit, fails the self-test."""
    target = core.load_model(str(tiny_folder("llama")), core.Options())
    target.speed_up()
    run_ragged = target._run_ragged

    def shaky(*given):
        logits, hidden = run_ragged(*given)
        return [torch.nextafter(row, row + 1) for row in logits], hidden

    assert target.make_exact() and target.is_exact
    monkeypatch.setattr(target, "_run_ragged", shaky)
    target.is_exact = False
    assert not target.make_exact() and not target.is_exact
    assert target.shapes.kv_steps == ()
    assert target.cache.lengths == [0] * target.cache.num_rows


def test_exactness_can_be_turned_off(tiny_folder):
    engine = core.load_engine(core.Options(model=str(tiny_folder("llama")), bitwise=False))
    assert not engine.is_exact and engine.target.shapes.kv_steps == ()


def test_one_token_is_decoded_in_the_number_of_rows_that_is_fastest(tiny_folder, monkeypatch):
    """On a clock of our own: four rows are worth it if they take a tenth less than one."""
    target = core.load_model(str(tiny_folder("llama")), core.Options())
    target.speed_up()
    now, costs, forward = [0.0], {1: 1.0, 2: 1.2, 4: 0.95, 8: 2.0}, target.forward

    def slow(*given):
        now[0] += costs[target.shapes.min_rows]
        return forward(*given)

    monkeypatch.setattr(target, "forward", slow)
    monkeypatch.setattr(core.time, "perf_counter", lambda: now[0])
    assert target.rows_by_speed() == [1, 4, 2, 8]
    costs[4] = 0.8
    assert target.rows_by_speed() == [4, 1, 2, 8]
    assert target.make_exact() and target.shapes.min_rows == 4
    assert target.cache.lengths == [0] * target.cache.num_rows


@pytest.mark.parametrize("min_rows", [2, 4, 8])
def test_padding_to_more_rows_changes_no_token(demo_engine, prompts, plain, min_rows):
    """A prompt of one token too: then there are fewer positions than rows."""
    engine = core.load_engine(core.Options())
    engine.target.shapes.min_rows = min_rows
    for drafter in (None, "ngram", "draft_model", "mtp"):
        for prompt in (prompts["code_class"], prompts["code_class"][:1]):
            sequence, _ = run(engine, prompt, max_tokens=24, drafter=drafter)
            assert sequence.output == plain(prompt, 24)
