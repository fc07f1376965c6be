"""GGUF files for the tests: models of transformers as llama.cpp's converter writes them.

    model = write(path, CASES["yarn"], kind=Q8_0)  # the file, and the original that it holds

A case states what a model's config has beside SMALL, and which keys of a header say so. It knows
nothing of how this project reads a header. Below it are changes of a file's bytes, for fuzzing.
"""

import json
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import hypothesis
import numpy as np
import pytest
import torch
from conftest import TARGET
from families import randomise
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as Value
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from runtime.models import StartError
from tools.training.heads import write_gguf as finish

Q4_0, Q8_0 = Kind.Q4_0, Kind.Q8_0

# -------------------------------------------------------------------------------- the cases
VOCAB, LAYERS, LENGTH = 4096, 4, 64
SMALL = {
    "vocab_size": VOCAB, "num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
RMS, NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
ALWAYS = {  # fields of a config, and the keys that say them in each file
    "vocab_size": "vocab_size", "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length", "rms_norm_eps": RMS,
}  # fmt: skip
MODEL_TYPES = {  # of transformers, where llama.cpp's name is another one
    "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text",
    "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text",
}  # fmt: skip
ONE_MORE = {"nemotron", "gemma2", "gemma3", "qwen35", "qwen35moe"}  # is added to norms in a file


@dataclass
class Case:
    """An architecture of llama.cpp, what its original's config has, and which keys say so."""

    architecture: str
    config: dict = field(default_factory=dict)
    keys: dict = field(default_factory=dict)
    length: int = LENGTH  # of the texts that may be served

    def header(self, **more):
        """All keys under the architecture's name."""
        fields = SMALL | self.config
        usual = {key: fields[name] for name, key in ALWAYS.items()}
        if NORM in self.keys:
            del usual[RMS]
        return usual | self.keys | more


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
    "epsilon": Case("llama", {"rms_norm_eps": 0.05}),
    "theta": Case("llama", rope(rope_theta=500.0), {"rope.freq_base": 500.0}),
    "head size": Case("llama", {"head_dim": 32}, HEAD_32),
    "biases": Case("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": Case("llama", {"tie_word_embeddings": True}),
    "rope_freqs": Case(
        "llama", rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                      original_max_position_embeddings=32),
        {"rope_freqs.weight": None}),
    "linear": Case("llama", rope(**LINEAR), OF_LINEAR | scaled(finetuned=True)),
    "linear, old": Case("llama", rope(**LINEAR), {"rope.scale_linear": 8.0}),
    "no scaling": Case("llama", {}, scaled(type="none", factor=8.0)),
    "yarn": Case("llama", rope(**YARN), OF_YARN),
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
    "gemma2": Case("gemma2", GEMMA | WINDOW, HEAD_32 | OF_WINDOW),
    "gemma2, caps": Case("gemma2", GEMMA | CAPS, HEAD_32 | CAPS),
    "gemma2, pattern": Case(
        "gemma2", GEMMA | WINDOW | {"layer_types": [LOCALLY, LOCALLY, FULLY, LOCALLY]},
        HEAD_32 | OF_WINDOW | {"attention.sliding_window_pattern": 3}),
    "gemma2, 27b": Case(
        "gemma2", GEMMA | {"query_pre_attn_scalar": 16, "num_hidden_layers": 46}, HEAD_32),
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
    "gemma3, one in two": Case(
        "gemma3", GEMMA | WINDOW | rotated() | {"layer_types": [LOCALLY, FULLY] * 2},
        HEAD_32 | OF_WINDOW | {"attention.sliding_window_pattern": 2}),
    "gemma3, 27b": Case(
        "gemma3", GEMMA | rotated()
        | {"query_pre_attn_scalar": 16, "num_hidden_layers": 62, "layer_types": [FULLY] * 62},
        HEAD_32),
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
        "starcoder2", rope(rope_theta=500.0) | {"norm_epsilon": 0.05},
        {NORM: 0.05, "rope.freq_base": 500.0}),
    "starcoder2, window": Case(
        "starcoder2", WINDOW | {"norm_epsilon": 0.05}, OF_WINDOW | {NORM: 0.05}),
    "nemotron, linear": Case(
        "nemotron", rope(partial_rotary_factor=1.0, **LINEAR)
        | {"norm_eps": 0.05, "head_dim": 16, "attention_bias": True, "mlp_bias": True},
        {NORM: 0.05, RMS: 0.05} | OF_LINEAR),
    "nemotron": Case(
        "nemotron", rope(partial_rotary_factor=0.5) | {"norm_eps": 0.05, "head_dim": 16},
        {NORM: 0.05, "rope.dimension_count": 8} | scaled(type="none")),
    "gpt2": Case(
        "gpt2", {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": LENGTH, "n_inner": 96,
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
TINY = Case(  # with room for the texts of other tests
    "llama", {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
              "max_position_embeddings": 256})  # fmt: skip


# --------------------------------------------------------------------------- the converter
def original(case):
    """The model of transformers that a case is about, with random weights."""
    torch.manual_seed(0)
    is_tied = case.architecture.startswith("gemma")  # always, in llama.cpp
    fields = SMALL | {"tie_word_embeddings": is_tied} | case.config
    model_type = MODEL_TYPES.get(case.architecture, case.architecture)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields)).eval()
    randomise(model)
    for name, weight in model.named_parameters():
        if model.config.num_hidden_layers > 9 and "post_" in name:
            weight.data.fill_(-0.9)  # or else so many random layers would blow roundings up
    return model


def converted(name, values, architecture, config):
    """A weight's numbers as llama.cpp has them."""
    if architecture == "llama" and (part := re.search(r"\.([qk])_proj\.", name)):
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}[part[1]]
        halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
        return halves.swapaxes(1, 2).reshape(values.shape)
    if architecture in ONE_MORE and name.endswith("norm.weight") and "linear_attn" not in name:
        return values + 1
    if architecture == "gpt2" and re.search(r"c_(attn|proj|fc)\.weight", name):
        return values.T
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return values.squeeze(1)
    if "shared_expert_gate" in name:
        return values[0]
    return -np.exp(values) if name.endswith("A_log") else values


def tensors_of(model, architecture):
    """A model's weights under llama.cpp's names; those that are tied once."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 99)
    weights = {}
    for name, values in model.state_dict().items():
        values = converted(name, values.numpy(), architecture, model.config)
        if name.endswith("gate_up_proj") and values.ndim == 3:  # of all experts
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                weights[name.replace("gate_up", part) + ".weight"] = half
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            name = name.replace("dt_bias", "dt_proj.bias")
            weights[name + ".weight" * (values.ndim == 3)] = values
    endings = ".weight", ".bias"
    return {names.get_name(name, endings) or name: values for name, values in weights.items()}


def add_keys(writer, prefix, keys):
    """Each key with the kind of its value; a key of the value None is left out."""
    kinds = {bool: Value.BOOL, int: Value.UINT32, str: Value.STRING}
    for name, value in keys.items():
        name = f"{prefix}.{name}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            writer.add_key_value(name, value, kinds.get(type(value), Value.FLOAT32))


def tokenizer_of_target(num_tokens):
    """Keys of the embedded target's tokenizer, filled up to so many tokens."""
    content = json.loads((Path(TARGET) / "tokenizer.json").read_text("utf-8"))["model"]
    words = sorted(content["vocab"], key=content["vocab"].get)
    words += [f"[PAD{i}]" for i in range(len(words), num_tokens)]
    return {
        "model": "gpt2", "pre": "smollm", "tokens": words, "eos_token_id": 0,
        "token_type": [3 if word == "<|endoftext|>" else 1 for word in words],
        "merges": [" ".join(m) if isinstance(m, list) else m for m in content["merges"]],
    }  # fmt: skip


def begun(path, architecture, keys, tokenizer=None, **options):
    """A writer that has these keys under the architecture's name, and a tokenizer's."""
    writer = gguf.GGUFWriter(path, architecture, **options)
    tokenizer = tokenizer or tokenizer_of_target(keys["vocab_size"])
    add_keys(writer, "general", {"name": "tiny"})
    add_keys(writer, architecture, keys)
    add_keys(writer, "tokenizer.ggml", tokenizer)
    return writer


def write(path, case, kind=None, more=(), tokenizer=None, without="no name", **options):
    """Write a case's file, its matrices in `kind` or float32. Returns the original.

    `more` has keys, and tensors by names that end in .weight or .bias: numbers, or (blocks, their
    kind). Tensors with `without` in their names are left out; `options` are the writer's.
    """
    model, keys = original(case), case.header(**dict(more))
    tensors = {k: v for k, v in tensors_of(model, case.architecture).items() if without not in k}
    tensors |= {name: keys.pop(name) for name in [*keys] if name.endswith((".weight", ".bias"))}
    if tensors.get("rope_freqs.weight", ()) is None:  # what frequencies are divided by
        rotary = model.get_decoder().rotary_emb
        usual = rotary.compute_default_rope_parameters(rotary.config)[0]
        tensors["rope_freqs.weight"] = (usual / rotary.inv_freq).numpy()
    tokenizer = tokenizer_of_target(keys["vocab_size"]) | (tokenizer or {})
    writer, floats = begun(path, case.architecture, keys, tokenizer, **options), []
    for name, values in tensors.items():
        if isinstance(values, tuple):
            writer.add_tensor(name, values[0], raw_dtype=values[1])
            continue
        values = np.ascontiguousarray(values, np.float32)
        is_packed = kind and values.ndim > 1 and "ffn_gate_inp." not in name
        floats.append((name, values, kind.name if is_packed else "F32"))
    finish(writer, (), floats)
    return model


# ------------------------------------------------------------------- bytes, and changes of them
def text(value):
    """A text as a header has it: its length, and its bytes."""
    value = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(value)) + value


def is_short_line(message):
    return message.isprintable() and len(message) <= 300


HUGE = 1 << 60
NUMBERS = [0, 1, 7, 31, 255, 1 << 16, 1 << 31, 1 << 32, HUGE, (1 << 64) - 1]
MUTATION = st.tuples(
    st.floats(0, 1, exclude_max=True),  # where in a part of the file
    st.sampled_from([0, 1, 4, 8, HUGE]),  # how many bytes go
    st.binary(max_size=8) | st.sampled_from([struct.pack("<Q", n) for n in NUMBERS]),
)
MANY = pytest.param(2000, marks=pytest.mark.slow)


def fuzz(count, path, good, parts, *reads):
    """Change one of the parts (begin, end) of a good file, `count` times, the same in each run.

    Each of `reads` is called with its path, and may refuse it in one line.
    """

    @hypothesis.settings(max_examples=count, deadline=None, derandomize=True, database=None)
    @hypothesis.given(st.lists(MUTATION, min_size=1, max_size=4), st.sampled_from(parts))
    def check(mutations, part):
        begin, end = part
        changed = bytearray(good[begin:end])
        for where, num_gone, new in mutations:
            at = int(where * len(changed))
            changed[at : at + num_gone] = new
        path.write_bytes(good[:begin] + changed + good[end:])
        for read in reads:
            try:
                read(str(path))
            except StartError as error:
                assert path.name in str(error) and is_short_line(str(error))

    check()
