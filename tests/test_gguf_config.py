"""A GGUF file's header becomes the config of the model that the file was made of.

    original model of transformers → a file with gguf's writer → our loader → the same logits

Each key that gguf knows is applied, or refused in one line that names it, and so is a file whose
header does not fit its weights. What files are compared with is the original model, which has not
seen our reading of them.
"""

from contextlib import ExitStack
from functools import cache
from itertools import combinations

import gguf
import numpy as np
import pytest
import torch
from gguf_files import LENGTH, NORM, RMS, VOCAB, Case, Kind, is_short_line, original, write
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS

from runtime.kernels import start
from runtime.models import StartError, gguf_config
from runtime.models.gguf_config import config_of
from runtime.models.gguf_file import BadFile
from runtime.models.gguf_model import open_model, why_not_packed
from runtime.models.gguf_tensors import unpacked
from runtime.models.loading import load_pretrained
from server.options import Options


# -------------------------------------------------------------------------------- the cases
def rope(**scaling):
    return {"rope_parameters": LOCAL | scaling}


def scaled(**keys):
    return {f"rope.scaling.{name}": value for name, value in keys.items()}


def rotated(fully=(), locally=()):
    """Rotations by kind of layer, as Gemma 3 has them."""
    return {"rope_parameters": {FULLY: LOCAL | dict(fully), LOCALLY: LOCAL | dict(locally)}}


LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
LOCALLY, FULLY, RECURRENT = "sliding_attention", "full_attention", "linear_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
OF_YARN = scaled(type="yarn", factor=4.0, original_context_length=16)
LINEAR, OF_LINEAR = {"rope_type": "linear", "factor": 8.0}, scaled(type="linear", factor=8.0)
SHORT, LONG = [1.0 + i / 8 for i in range(8)], [1.0 + i for i in range(8)]
LONGROPE = rope(
    rope_type="longrope", short_factor=SHORT, long_factor=LONG, factor=2.0,
    original_max_position_embeddings=32, partial_rotary_factor=1.0,
) | {"original_max_position_embeddings": 32}  # fmt: skip
FACTORS = {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG}
SQRT = (1 + np.log(2) / np.log(32)) ** 0.5
OF_LONGROPE = FACTORS | scaled(original_context_length=32, attn_factor=SQRT)
HEAD_32 = {"attention.key_length": 32, "attention.value_length": 32}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "rms_norm_eps": 0.05}
WINDOW, OF_WINDOW = {"sliding_window": 9}, {"attention.sliding_window": 9}
CAPS = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OF_MIXTURE = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
SHARED = {"shared_expert_intermediate_size": 64}
OF_SHARED = {"expert_shared_feed_forward_length": 64}
MROPE = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
HYBRID = rope(**MROPE) | {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "head_dim": 32, "rms_norm_eps": 0.05,
    "full_attention_interval": 2, "layer_types": [RECURRENT, FULLY] * 2,
}  # fmt: skip
OF_HYBRID = HEAD_32 | {
    "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 2,
    "ssm.inner_size": 32, "full_attention_interval": 2, "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0], "rope.freq_base": 10000.0,
}  # fmt: skip

CASES = {
    "llama": Case("llama"),
    "llama, other": Case(
        "llama", {"rms_norm_eps": 0.05, "head_dim": 32, "attention_bias": True, "mlp_bias": True},
        HEAD_32),
    "tied": Case("llama", {"tie_word_embeddings": True}),
    "rope_freqs": Case(
        "llama", rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                      original_max_position_embeddings=32),
        {"rope_freqs.weight": None}),
    "linear, old": Case("llama", rope(**LINEAR), {"rope.scale_linear": 8.0}),
    "yarn, all": Case(
        "qwen2", rope(**YARN, beta_fast=8.0, beta_slow=2.0, attention_factor=1.5),
        OF_YARN | scaled(yarn_beta_fast=8.0, yarn_beta_slow=2.0, yarn_attn_factor=1.5)),
    "yarn, attn_factor": Case(
        "qwen3", rope(**YARN, attention_factor=0.5 * (1 + 0.1 * np.log(4.0))) | {"head_dim": 16},
        OF_YARN | scaled(attn_factor=0.5, yarn_ext_factor=1.0)),
    "qwen2": Case("qwen2"),
    "qwen3": Case("qwen3", {"head_dim": 32}, HEAD_32),
    "qwen3, biases": Case("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen2moe": Case("qwen2moe", MIXTURE | SHARED, OF_MIXTURE | OF_SHARED),
    "qwen3moe": Case("qwen3moe", MIXTURE | {"norm_topk_prob": True, "head_dim": 16}, OF_MIXTURE),
    "expert_weights_norm": Case(
        "qwen3moe", MIXTURE | {"norm_topk_prob": False, "head_dim": 16},
        OF_MIXTURE | {"expert_weights_norm": False, "expert_gating_func": 1}),
    "phi3": Case("phi3"),
    "phi3, window": Case("phi3", WINDOW, OF_WINDOW),
    "phi3, part": Case("phi3", rope(partial_rotary_factor=0.75), {"rope.dimension_count": 12}),
    "longrope, short": Case("phi3", LONGROPE, OF_LONGROPE, length=30),
    "longrope, long": Case("phi3", LONGROPE, OF_LONGROPE | scaled(type="longrope")),
    "gemma2": Case("gemma2", GEMMA | WINDOW | CAPS, HEAD_32 | OF_WINDOW | CAPS),
    "gemma2, pattern": Case(
        "gemma2", GEMMA | WINDOW | {"layer_types": [LOCALLY, LOCALLY, FULLY, LOCALLY]},
        HEAD_32 | OF_WINDOW | {"attention.sliding_window_pattern": 3}),
    "gemma3": Case(
        "gemma3", GEMMA | WINDOW | rotated(LINEAR | {"rope_theta": 1e6})
        | {"num_hidden_layers": 7, "layer_types": [*[LOCALLY] * 5, FULLY, LOCALLY]},
        HEAD_32 | OF_WINDOW | OF_LINEAR | {"rope.freq_base": 1e6}),
    "gemma3, all": Case(
        "gemma3", GEMMA | WINDOW | rotated({"rope_theta": 1e6}, {"rope_theta": 500.0})
        | {"layer_types": [LOCALLY, FULLY] * 2, "final_logit_softcapping": 2.0},
        HEAD_32 | OF_WINDOW
        | {"rope.freq_base": 1e6, "rope.freq_base_swa": 500.0, "final_logit_softcapping": 2.0,
           "attention.sliding_window_pattern": [True, False] * 2}),
    "stablelm": Case(
        "stablelm", rope(partial_rotary_factor=0.25, rope_theta=500.0) | {"layer_norm_eps": 0.05},
        {NORM: 0.05, "rope.dimension_count": 4, "rope.freq_base": 500.0,
         "use_parallel_residual": True},  # as a converter guesses
    ),
    "stablelm, parallel": Case(
        "stablelm", rope(partial_rotary_factor=0.5)
        | {"layer_norm_eps": 0.05, "use_qkv_bias": True, "use_parallel_residual": True},
        {NORM: 0.05, "rope.dimension_count": 8, "use_parallel_residual": True}),
    "starcoder2": Case(
        "starcoder2", WINDOW | rope(rope_theta=500.0) | {"norm_epsilon": 0.05},
        OF_WINDOW | {NORM: 0.05, "rope.freq_base": 500.0}),
    "nemotron, linear": Case(
        "nemotron", rope(partial_rotary_factor=1.0, **LINEAR)
        | {"norm_eps": 0.05, "head_dim": 16, "attention_bias": True, "mlp_bias": True},
        {NORM: 0.05, RMS: 0.05} | OF_LINEAR | scaled(finetuned=True)),
    "nemotron": Case(
        "nemotron", rope(partial_rotary_factor=0.5) | {"norm_eps": 0.05, "head_dim": 16},
        {NORM: 0.05, "rope.dimension_count": 8} | scaled(type="none", factor=8.0)),
    "gpt2": Case(
        "gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": LENGTH, "n_inner": 96,
                 "layer_norm_epsilon": 0.05, "tie_word_embeddings": True},
        {NORM: 0.05, "attention.head_count_kv": 4}),
    "qwen35": Case("qwen35", HYBRID, OF_HYBRID),
    "qwen35, recurrent_layers": Case(
        "qwen35", HYBRID | {"layer_types": [FULLY, *[RECURRENT] * 3]},
        OF_HYBRID | {"attention.recurrent_layers": [False, True, True, True]}),
    "qwen35, yarn": Case("qwen35", HYBRID | rope(**MROPE, **YARN), OF_HYBRID | OF_YARN),
    "qwen35moe": Case("qwen35moe", HYBRID | MIXTURE | SHARED, OF_HYBRID | OF_MIXTURE | OF_SHARED),
    "lfm2": Case(
        "lfm2", rope() | {"layer_types": ["conv", FULLY] * 2, "block_auto_adjust_ff_dim": False,
                          "norm_eps": 0.05, "conv_L_cache": 3, "conv_bias": False},
        {"attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 3, RMS: 0.05,
         "rope.freq_base": 10000.0}),
}  # fmt: skip


# --------------------------------------------------------------------------- what is computed
@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


@torch.no_grad()
def logits_of(model, length):
    ids = torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, use_cache=False).logits[0]


@cache
def expected_of(name):
    """The logits of a case's original."""
    return logits_of(original(CASES[name]), CASES[name].length)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS"])
def test_blocks_are_unpacked_in_pieces_as_gguf_unpacks_them(path, monkeypatch, kind):
    monkeypatch.setattr("runtime.models.gguf_tensors._PIECE", 2560)
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind := Kind[kind]]
    blocks = np.random.default_rng(0).integers(0, 60, (17, 1024 // block * num_bytes), np.uint8)
    write(path, CASES["llama"], more={"extra.weight": (blocks, kind)})
    with open_model(str(path)) as file:
        ours = unpacked(file, file.tensors["extra.weight"], torch.float32).numpy()
    assert np.array_equal(ours, gguf.dequantize(blocks, kind))


@pytest.mark.parametrize("name", CASES)
def test_a_file_s_logits_are_those_of_the_model_that_it_was_made_of(path, name, monkeypatch):
    """Unpacked, in pieces; and as it lies in the file, where the family's matrices can be."""
    start.setup(None, "cpu", True)
    monkeypatch.setattr("runtime.models.gguf_tensors._PIECE", 2560)  # 40 rows
    write(path, CASES[name])
    length, expected = CASES[name].length, expected_of(name)
    with open_model(str(path)) as file:
        dtypes = ["float32"] if why_not_packed(file) else ["float32", "auto"]
    for dtype in dtypes:
        options = Options(dtype=dtype, max_model_len=length)
        logits = logits_of(load_pretrained(str(path), options).model, length)
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4 * float(expected.std()))


def test_each_case_is_seen_in_the_logits():
    """So a key that is dropped would fail: all originals of a kind say other things."""
    for (one, case), (other, another) in combinations(CASES.items(), 2):
        is_same = case.config == another.config or case.architecture != another.architecture
        if not is_same:
            logits = (expected_of(name)[:30] for name in (one, other))
            assert abs(next(logits) - next(logits)).max() > 0.01, (one, other)


# ------------------------------------------------------------------------ what is not dropped
def keys_of(part):
    """All keys that gguf knows under an architecture's name."""
    for value in vars(part).values():
        if isinstance(value, type):
            yield from keys_of(value)
        elif isinstance(value, str) and value.startswith("{arch}."):
            yield value.removeprefix("{arch}.")


FIRST = {case.architecture: case for case in reversed(CASES.values())}  # the first case of each


@pytest.fixture
def config_with(path):
    """A function for a case: the config of a header that has these keys more."""

    def reader_of(case):
        write(path, case)
        file = files.enter_context(open_model(str(path)))
        usual = file.metadata

        def read(**keys):
            file.metadata = usual | {f"{case.architecture}.{k}": v for k, v in keys.items()}
            return config_of(file).to_dict()

        return read

    with ExitStack() as files:
        yield reader_of


@pytest.mark.parametrize("architecture", [*gguf_config.FAMILIES, *GGUF_CONFIG_ARCHS])
def test_each_key_that_gguf_knows_is_applied_or_refused(config_with, architecture):
    """A key with another value changes the config, or is named in a refusal."""
    read, dropped = config_with(FIRST[architecture]), set()
    config = read()
    for key in {*keys_of(gguf.Keys)} - set(gguf_config.NO_EFFECT):
        try:
            if read(**{key: 24}) == config:
                dropped.add(key)
        except Exception as error:  # of transformers, where such a model cannot be
            is_ours = isinstance(error, BadFile)
            assert not is_ours or key in str(error), (key, str(error))
    assert not dropped


@pytest.mark.parametrize(("name", "more", "reason"), [
    ("llama", {"dreams": 1}, "'llama.dreams' is 1, which llama has not here"),
    ("llama", {"blk.1.dream.weight": [1.0]}, "reads its tensor 'blk.1.dream.weight'"),
    ("llama", {"blk.1.attn_q.bias": [1.0] * 64}, "reads its tensor 'blk.1.attn_q.bias'"),
    ("lfm2", {"blk.1.dream.weight": [1.0]}, "reads its tensor 'blk.1.dream.weight'"),
    ("llama", {"rope_factors_long.weight": LONG}, "lacks a list of factors"),
    ("phi3", FACTORS | {"rope_freqs.weight": LONG}, "scaled in two ways"),
    ("yarn, all", {"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
    ("yarn, all", {"rope.scaling.yarn_attn_factor": 1.0}, "yarn_attn_factor is 1.0"),
    ("llama", {"rope.scaling.type": "spiral"}, "'spiral', which is not known"),
    ("llama", {"attention.head_count": [4, 4, 4, 2]}, "head_count is \\[4, 4, 4, 2\\]"),
    ("llama", {"expert_count": 4}, "'llama.expert_count' is 4"),
    ("phi3", {"rope.dimension_count": 7}, "dimension_count is 7"),
    ("llama", {"embedding_length": 1 << 30}, "and its header asks for"),
    ("llama", {"block_count": 1 << 31}, "and 'llama.block_count' is 2147483648"),
    ("llama", {"block_count": 3}, "has weights of block 3, and 'llama.block_count' is 3 .fetch it"),
    ("llama", {"feed_forward_length": 64}, r"weights, first model.layers.0.mlp.down_proj.*: .64"),
    ("llama", {"attention.head_count_kv": 0}, "head_count_kv' is 0 .fetch"),
    ("llama", {"blk.1.ffn_up.weight": (np.zeros((96, 80), np.uint8), Kind.Q8_1)}, "unpacked: Q8_1"),
    ("qwen3moe", dict.fromkeys(f"blk.{i}.ffn_up_exps.weight" for i in range(4)), "gate_up_proj"),
])  # fmt: skip
def test_what_would_be_another_model_or_none_is_refused(path, name, more, reason):
    """In one line with its name, packed or not."""
    start.setup(None, "cpu", True)
    write(path, CASES[name], more=more)
    for dtype in ("auto", "float32"):
        with pytest.raises(StartError, match=reason) as error:
            load_pretrained(str(path), Options(dtype=dtype))
        assert "model.gguf" in str(error.value) and is_short_line(str(error.value))


def test_a_file_of_an_unknown_family_is_refused(path):
    write(path, CASES["llama"])
    path.write_bytes(path.read_bytes().replace(b"llama", b"martn", 1))
    with pytest.raises(StartError, match="'martn' are not read from GGUF files .give the model's"):
        load_pretrained(str(path), Options())


@pytest.mark.parametrize(("name", "keys", "field", "expected"), [
    ("phi3", {"context_length": 4096}, "sliding_window", 2047),  # of early files
    ("phi3", {"context_length": 16384}, "sliding_window", None),
    ("phi3", {"context_length": 4096, "attention.sliding_window": 0}, "sliding_window", None),
    ("gemma2", {}, "query_pre_attn_scalar", 32),
    ("gemma2", {"block_count": 46}, "query_pre_attn_scalar", 16),
    ("gemma3", {"block_count": 46}, "query_pre_attn_scalar", 32),
    ("gemma3", {"block_count": 62}, "query_pre_attn_scalar", 16),
])  # fmt: skip
def test_what_no_key_says_is_that_of_the_original(config_with, name, keys, field, expected):
    """Windows of Phi-3; scales of Gemma's models of 27 billion weights, known by their layers."""
    assert config_with(CASES[name])(**keys)[field] == expected


class Counted(str):
    """A key that counts how often it is compared or taken apart."""

    count = 0

    def removeprefix(self, prefix):
        Counted.count += 1
        return super().removeprefix(prefix)

    def startswith(self, *prefix):
        Counted.count += 1
        return super().startswith(*prefix)


def test_each_of_many_keys_is_looked_at_a_few_times(path):
    """60,000 keys took 25 s where each was searched among the others."""
    write(path, CASES["llama"])
    with open_model(str(path)) as file:
        file.metadata |= {Counted(f"general.key{i}"): i for i in range(60_000)}
        config_of(file)
    assert 60_000 <= Counted.count <= 5 * 60_000


def test_a_text_ends_where_the_file_says(path):
    """A config of transformers would have Llama 2's token 2 end it."""
    write(path, CASES["llama"], tokenizer={"eot_token_id": 7})
    assert load_pretrained(str(path), Options()).eos_ids == {0, 7}
