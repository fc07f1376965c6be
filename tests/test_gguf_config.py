"""A GGUF file is the model that it was made of: each key of its header is applied or refused.

    original model of transformers → a file with gguf's writer → our loader → the same logits

Files are made as llama.cpp's converter makes them. What they are compared with is the original
model, which has not seen our reading of the file.
"""

import re
from dataclasses import dataclass, field

import gguf
import numpy as np
import pytest
import torch
from families import randomise
from test_gguf import interleaved
from test_kernels import needs_compiler
from transformers import AutoConfig, AutoModelForCausalLM

from demo_models.heads import write_gguf as finish
from kernels import start
from models import gguf_check, gguf_config, gguf_packed
from models.gguf_config import config_of
from models.gguf_file import BadFile
from models.gguf_model import load_model, open_model
from models.loading import check_weights
from models.rope import fix_rotations

VOCAB, LAYERS, LENGTH = 96, 4, 64
SMALL = {
    "vocab_size": VOCAB, "num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
KEYS = {
    "context_length": LENGTH, "embedding_length": 64, "block_count": LAYERS, "vocab_size": VOCAB,
    "feed_forward_length": 96, "attention.head_count": 4, "attention.head_count_kv": 2,
}  # fmt: skip
RMS, NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
GEMMA = {"attention.key_length": 32, "attention.value_length": 32, RMS: 0.05}
ONE_MORE = {"nemotron", "gemma2", "gemma3"}  # whose norms are multiplied by one more


@dataclass
class Case:
    """An architecture of llama.cpp, what its original has, and which keys say so."""

    architecture: str
    original: dict = field(default_factory=dict)
    keys: dict = field(default_factory=dict)
    length: int = LENGTH  # of the texts that may be served
    model_type: str = ""


def rope(**scaling):
    return {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", **scaling}}


def scaled(**keys):
    return {f"rope.scaling.{name}": value for name, value in keys.items()}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
OF_YARN = scaled(type="yarn", factor=4.0, original_context_length=16)
SHORT, LONG = [1.0 + i / 8 for i in range(8)], [1.0 + i for i in range(8)]
LONGROPE = {
    "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 4.0,
    "original_max_position_embeddings": 32, "partial_rotary_factor": 1.0,
}  # fmt: skip
SQRT = (1 + np.log(4) / np.log(32)) ** 0.5
FACTORS = {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG}
LINEAR = {"rope_type": "linear", "factor": 8.0}
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
THIRD = {"num_hidden_layers": LAYERS, "head_dim": 32, "query_pre_attn_scalar": 32}
BOTH = ["sliding_attention", "full_attention"] * 2
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OF_MIXTURE = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
HYBRID = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "head_dim": 32,
    "full_attention_interval": 2, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
OF_HYBRID = {
    "attention.key_length": 32, "attention.value_length": 32, "ssm.conv_kernel": 4,
    "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 2, "ssm.inner_size": 32,
    "full_attention_interval": 2, "rope.dimension_count": 8, RMS: 0.05,
    "rope.dimension_sections": [2, 1, 1, 0], "rope.freq_base": 10000.0,
}  # fmt: skip
MROPE = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}

CASES = {
    "llama": Case("llama"),
    "epsilon": Case("llama", {"rms_norm_eps": 0.05}, {RMS: 0.05}),
    "theta": Case("llama", rope(rope_theta=500.0), {"rope.freq_base": 500.0}),
    "head size": Case(
        "llama", {"head_dim": 32}, {"attention.key_length": 32, "attention.value_length": 32}
    ),
    "biases": Case("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": Case("llama", {"tie_word_embeddings": True}),
    "rope_freqs": Case(
        "llama",
        rope(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
        {"rope_freqs.weight": None},
    ),
    "linear": Case("llama", rope(**LINEAR), scaled(type="linear", factor=8.0, finetuned=True)),
    "linear, old": Case("llama", rope(**LINEAR), {"rope.scale_linear": 8.0}),
    "no scaling": Case("llama", {}, scaled(type="none", factor=8.0)),
    "yarn": Case("llama", rope(**YARN), OF_YARN),
    "yarn, all": Case(
        "qwen2",
        rope(**YARN, beta_fast=8.0, beta_slow=2.0, attention_factor=1.5),
        OF_YARN | scaled(yarn_beta_fast=8.0, yarn_beta_slow=2.0, yarn_attn_factor=1.5),
    ),
    "yarn, attn_factor": Case(
        "qwen3",
        rope(**YARN, attention_factor=0.5 * (1 + 0.1 * np.log(4.0))) | {"head_dim": 16},
        OF_YARN | scaled(attn_factor=0.5, yarn_ext_factor=1.0),
    ),
    "qwen2": Case("qwen2"),
    "qwen3": Case("qwen3", {"head_dim": 32}, {"attention.key_length": 32} | {"attention.value_length": 32}),
    "qwen3, biases": Case("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen2moe": Case(
        "qwen2moe",
        MIXTURE | {"shared_expert_intermediate_size": 48},
        OF_MIXTURE | {"expert_shared_feed_forward_length": 48},
        model_type="qwen2_moe",
    ),
    "qwen3moe": Case(
        "qwen3moe", MIXTURE | {"norm_topk_prob": True, "head_dim": 16}, OF_MIXTURE,
        model_type="qwen3_moe",
    ),
    "expert_weights_norm": Case(
        "qwen3moe", MIXTURE | {"norm_topk_prob": False, "head_dim": 16},
        OF_MIXTURE | {"expert_weights_norm": False, "expert_gating_func": 1},
        model_type="qwen3_moe",
    ),
    "phi3": Case("phi3"),
    "phi3, window": Case("phi3", {"sliding_window": 9}, {"attention.sliding_window": 9}),
    "phi3, part": Case(
        "phi3", rope(partial_rotary_factor=0.75), {"rope.dimension_count": 12}
    ),
    "longrope, short": Case(
        "phi3", rope(**LONGROPE) | {"original_max_position_embeddings": 32},
        scaled(original_context_length=32, attn_factor=SQRT) | FACTORS, length=30,
    ),
    "longrope, long": Case(
        "phi3", rope(**LONGROPE) | {"original_max_position_embeddings": 32},
        scaled(type="longrope", original_context_length=32, attn_factor=SQRT) | FACTORS,
    ),
    "gemma2": Case(
        "gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 9, "rms_norm_eps": 0.05},
        GEMMA | {"attention.sliding_window": 9},
    ),
    "gemma2, caps": Case(
        "gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "rms_norm_eps": 0.05,
         "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
        GEMMA | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
    ),
    "gemma2, 27b": Case(
        "gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 16, "num_hidden_layers": 46,
         "rms_norm_eps": 0.05},
        GEMMA | {"block_count": 46},
    ),
    "gemma3": Case(
        "gemma3",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 9, "rms_norm_eps": 0.05,
         "num_hidden_layers": 7, "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
         "rope_parameters": {"full_attention": LOCAL | LINEAR | {"rope_theta": 1e6}, "sliding_attention": LOCAL}},
        GEMMA | scaled(type="linear", factor=8.0)
        | {"attention.sliding_window": 9, "rope.freq_base": 1e6, "block_count": 7},
        model_type="gemma3_text",
    ),
    "gemma3, pattern": Case(
        "gemma3",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 9, "rms_norm_eps": 0.05,
         "layer_types": BOTH, "final_logit_softcapping": 2.0,
         "rope_parameters": {"full_attention": LOCAL | {"rope_theta": 1e6}, "sliding_attention": LOCAL | {"rope_theta": 500.0}}},
        GEMMA | {"attention.sliding_window": 9, "rope.freq_base": 1e6, "rope.freq_base_swa": 500.0,
        "attention.sliding_window_pattern": [True, False] * 2, "final_logit_softcapping": 2.0},
        model_type="gemma3_text",
    ),
    "gemma3, one in two": Case(
        "gemma3",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 9, "rms_norm_eps": 0.05,
         "layer_types": BOTH,
         "rope_parameters": {"full_attention": LOCAL, "sliding_attention": LOCAL}},
        GEMMA | {"attention.sliding_window": 9, "attention.sliding_window_pattern": 2},
        model_type="gemma3_text",
    ),
    "gemma3, 27b": Case(
        "gemma3",
        {"head_dim": 32, "query_pre_attn_scalar": 16, "num_hidden_layers": 62, "rms_norm_eps": 0.05,
         "layer_types": ["full_attention"] * 62,
         "rope_parameters": {"full_attention": LOCAL, "sliding_attention": LOCAL}},
        GEMMA | {"block_count": 62}, model_type="gemma3_text",
    ),
    "stablelm": Case(
        "stablelm", rope(partial_rotary_factor=0.25, rope_theta=500.0) | {"layer_norm_eps": 0.05},
        {NORM: 0.05, "rope.dimension_count": 4, "rope.freq_base": 500.0,
         "use_parallel_residual": False},
    ),
    "stablelm, parallel": Case(
        "stablelm", rope(partial_rotary_factor=0.5)
        | {"layer_norm_eps": 0.05, "use_qkv_bias": True, "use_parallel_residual": True},
        {NORM: 0.05, "rope.dimension_count": 8, "use_parallel_residual": True},
    ),
    "starcoder2": Case(
        "starcoder2", rope(rope_theta=500.0) | {"norm_epsilon": 0.05},
        {NORM: 0.05, "rope.freq_base": 500.0},
    ),
    "starcoder2, window": Case(
        "starcoder2", {"norm_epsilon": 0.05, "sliding_window": 9},
        {NORM: 0.05, "attention.sliding_window": 9},
    ),
    "nemotron": Case(
        "nemotron", rope(partial_rotary_factor=0.5) | {"norm_eps": 0.05, "head_dim": 16},
        {NORM: 0.05, "rope.dimension_count": 8} | scaled(type="none"),
    ),
    "nemotron, linear": Case(
        "nemotron", rope(partial_rotary_factor=1.0, **LINEAR)
        | {"norm_eps": 0.05, "head_dim": 16, "attention_bias": True, "mlp_bias": True},
        {NORM: 0.05} | scaled(type="linear", factor=8.0),
    ),
    "gpt2": Case(
        "gpt2",
        {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": LENGTH, "n_inner": 96,
         "layer_norm_epsilon": 0.05, "tie_word_embeddings": True},
        {NORM: 0.05, "attention.head_count_kv": 4},
    ),
    "qwen35": Case(
        "qwen35", HYBRID | rope(**MROPE) | {"rms_norm_eps": 0.05}, OF_HYBRID, model_type="qwen3_5_text",
    ),
    "qwen35, recurrent_layers": Case(
        "qwen35",
        HYBRID | rope(**MROPE) | {"rms_norm_eps": 0.05, "layer_types": ["full_attention", *["linear_attention"] * 3]},
        OF_HYBRID | {"attention.recurrent_layers": [False, True, True, True]},
        model_type="qwen3_5_text",
    ),
    "qwen35, yarn": Case(
        "qwen35", HYBRID | rope(**MROPE, **YARN) | {"rms_norm_eps": 0.05}, OF_HYBRID | OF_YARN,
        model_type="qwen3_5_text",
    ),
    "lfm2": Case(
        "lfm2",
        rope()
        | {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False, "norm_eps": 0.05,
         "conv_L_cache": 3, "conv_bias": False},
        {"attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 3, RMS: 0.05, "rope.freq_base": 10000.0},
    ),
}  # fmt: skip


def original(case):
    """The model of transformers that a case is about, with random weights."""
    torch.manual_seed(0)
    is_tied = case.architecture.startswith("gemma")  # always, in llama.cpp
    fields = SMALL | {"tie_word_embeddings": is_tied} | case.original
    config = AutoConfig.for_model(case.model_type or case.architecture, **fields)
    model = AutoModelForCausalLM.from_config(config).eval()
    randomise(model)
    for name, weight in model.named_parameters():
        if config.num_hidden_layers > 9 and "post_" in name:
            weight.data.fill_(-0.9)  # or else so many random layers would blow roundings up
    return model


def tensors_of(model, case):
    """Its weights under llama.cpp's names and in llama.cpp's order of rows."""
    config, weights = model.config, {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[case.architecture.upper()], 99)
    heads = {
        "q_proj": config.num_attention_heads,
        "k_proj": getattr(config, "num_key_value_heads", 0),
    }
    for name, values in model.state_dict().items():
        values = values.numpy()
        part = name.split(".")[-2]
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if case.architecture == "llama" and part in heads:
            values = interleaved(values.reshape(len(values), -1), heads[part]).reshape(values.shape)
        if case.architecture in ONE_MORE and name.endswith("norm.weight"):
            values = values + 1
        if case.architecture == "qwen35":
            name, values = of_hybrid(name, values)
        if case.architecture == "lfm2" and name.endswith("conv.conv.weight"):
            values = values.squeeze(1)
        if case.architecture == "gpt2" and re.search(r"c_(attn|proj|fc)\.weight", name):
            values = values.T
        if name.endswith("gate_up_proj") and values.ndim == 3:
            gate, up = np.split(values, 2, axis=1)
            weights[name.replace("gate_up_proj", "gate_proj.weight")] = gate
            name, values = name.replace("gate_up_proj", "up_proj.weight"), up
        elif values.ndim == 3:
            name += ".weight"
        elif "shared_expert_gate" in name:
            values = values[0]
        weights[name] = values
    return {
        names.get_name(name, (".weight", ".bias")) or name: own for name, own in weights.items()
    }


def of_hybrid(name, values):
    """Qwen3.5's as llama.cpp has it, whose heads of values number no more than those of keys."""
    if name.endswith("A_log"):
        return name, -np.exp(values)
    if name.endswith("conv1d.weight"):
        return name, values.squeeze(1)
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return name, values + 1
    return name.replace("dt_bias", "dt_proj.bias"), values


def header(path, architecture, **keys):
    """A writer with these keys under the architecture's name, each of the kind of its value."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"{i}" for i in range(VOCAB)])
    writer.add_token_merges([])
    for name, value in keys.items():
        key = f"{architecture}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            kinds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
            kinds.get(type(value), writer.add_float32)(key, value)
    return writer


def write(path, case, model=None, **more):
    """The case's file; more keys may be added. Returns the original."""
    model = model or original(case)
    usual = {RMS: 1e-6} if NORM not in case.keys else {}
    if case.architecture == "phi3":
        usual[RMS] = 1e-5
    keys = KEYS | usual | case.keys | more
    extra = {name: keys.pop(name) for name in [*keys] if name.endswith(".weight")}
    weights = tensors_of(model, case)
    for name, values in extra.items():
        if values is None:  # what the original's frequencies are divided by
            rotary = model.get_decoder().rotary_emb
            usual = rotary.compute_default_rope_parameters(rotary.config)[0]
            values = (usual / rotary.inv_freq).numpy()
        weights[name] = np.asarray(values, np.float32)
    tensors = [(name, np.ascontiguousarray(values), "F32") for name, values in weights.items()]
    finish(header(path, case.architecture, **keys), (), tensors)
    return model


@torch.no_grad()
def logits_of(model, length):
    ids = torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, use_cache=False).logits[0]


def loaded(path, length, is_packed):
    """The model of a file as the server has it, with transformers' modules."""
    with open_model(str(path)) as file:
        read = gguf_packed.load_packed if is_packed else load_model
        model, report = read(file, config_of(file), *[torch.float32] * (not is_packed))
        check = gguf_check.check_of(file)
    check_weights(str(path), report)
    fix_rotations(model, length)
    check(model, length)
    return model


@pytest.mark.parametrize("name", CASES)
def test_a_file_s_logits_are_those_of_the_model_that_it_was_made_of(tmp_path, name):
    """Unpacked; and as it lies in the file, where the family's matrices can be."""
    start.get_ready(None, "cpu", True)
    case, path = CASES[name], tmp_path / "model.gguf"
    expected = logits_of(write(path, case), case.length)
    with open_model(str(path)) as file:
        ways = [False, True] if gguf_packed.why_not(file) is None else [False]
    for is_packed in ways:
        found = logits_of(loaded(path, case.length, is_packed), case.length)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-4 * float(expected.std()))


def test_each_case_is_seen_in_the_logits():
    """So a key that is dropped would fail: all originals of a kind say other things."""
    said = {name: logits_of(original(case), 30) for name, case in CASES.items()}
    for one, case in CASES.items():
        for other in CASES:
            same_family = CASES[other].architecture == case.architecture
            if one < other and same_family and said[one].shape == said[other].shape:
                is_same = case.original == CASES[other].original
                assert is_same or (said[one] - said[other]).abs().max() > 0.01, (one, other)
