"""A GGUF file is the model that it was made of: each key of its header is applied or refused.

    original model of transformers → a file with gguf's writer → our loader → the same logits

Files are made as llama.cpp's converter makes them. What they are compared with is the original
model, which has not seen our reading of the file.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import pytest
import speculative_decoding as core
import torch
from conftest import TARGET, assert_lossless
from families import randomise
from test_gguf import interleaved, tell_tokens
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS

from demo_models.heads import write_gguf as finish
from kernels import start
from models import StartError, gguf_check, gguf_config, loading
from models.gguf_config import config_of
from models.gguf_file import BadFile
from models.gguf_model import load_model, open_model, why_not_packed
from models.loading import check_weights, load_pretrained
from models.rope import fix_rotations
from serving.options import Options

VOCAB, LAYERS, LENGTH = 4096, 4, 64
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
HEAD_32 = {"attention.key_length": 32, "attention.value_length": 32}
GEMMA = HEAD_32 | {RMS: 0.05}
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
    "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 2.0,
    "original_max_position_embeddings": 32, "partial_rotary_factor": 1.0,
}  # fmt: skip
SQRT = (1 + np.log(2) / np.log(32)) ** 0.5
FACTORS = {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG}
LINEAR = {"rope_type": "linear", "factor": 8.0}
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
LOCALLY, FULLY = "sliding_attention", "full_attention"
BOTH = [LOCALLY, FULLY] * 2
OF_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "rms_norm_eps": 0.05}
WINDOW, OF_WINDOW = {"sliding_window": 9}, {"attention.sliding_window": 9}


def rotated(fully=LOCAL, locally=LOCAL):
    """As Gemma 3 has it: by kind of layer."""
    return {"rope_parameters": {FULLY: LOCAL | fully, LOCALLY: locally}}


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
        "llama", {"head_dim": 32}, HEAD_32
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
    "qwen3": Case("qwen3", {"head_dim": 32}, HEAD_32),
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
    "gemma2": Case("gemma2", OF_GEMMA | WINDOW, GEMMA | OF_WINDOW),
    "gemma2, caps": Case(
        "gemma2", OF_GEMMA | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
        GEMMA | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
    ),
    "gemma2, pattern": Case(
        "gemma2", OF_GEMMA | WINDOW | {"layer_types": [LOCALLY, LOCALLY, FULLY, LOCALLY]},
        GEMMA | OF_WINDOW | {"attention.sliding_window_pattern": 3},
    ),
    "gemma2, 27b": Case(
        "gemma2", OF_GEMMA | {"query_pre_attn_scalar": 16, "num_hidden_layers": 46},
        GEMMA | {"block_count": 46},
    ),
    "gemma3": Case(
        "gemma3",
        OF_GEMMA | WINDOW | rotated(LINEAR | {"rope_theta": 1e6})
        | {"num_hidden_layers": 7, "layer_types": [*[LOCALLY] * 5, FULLY, LOCALLY]},
        GEMMA | OF_WINDOW | scaled(type="linear", factor=8.0)
        | {"rope.freq_base": 1e6, "block_count": 7},
        model_type="gemma3_text",
    ),
    "gemma3, all": Case(
        "gemma3",
        OF_GEMMA | WINDOW | rotated({"rope_theta": 1e6}, LOCAL | {"rope_theta": 500.0})
        | {"layer_types": BOTH, "final_logit_softcapping": 2.0},
        GEMMA | OF_WINDOW
        | {"rope.freq_base": 1e6, "rope.freq_base_swa": 500.0, "final_logit_softcapping": 2.0,
           "attention.sliding_window_pattern": [True, False] * 2},
        model_type="gemma3_text",
    ),
    "gemma3, one in two": Case(
        "gemma3", OF_GEMMA | WINDOW | rotated() | {"layer_types": BOTH},
        GEMMA | OF_WINDOW | {"attention.sliding_window_pattern": 2}, model_type="gemma3_text",
    ),
    "gemma3, 27b": Case(
        "gemma3",
        OF_GEMMA | rotated()
        | {"query_pre_attn_scalar": 16, "num_hidden_layers": 62, "layer_types": [FULLY] * 62},
        GEMMA | {"block_count": 62}, model_type="gemma3_text",
    ),
    "stablelm": Case(
        "stablelm", rope(partial_rotary_factor=0.25, rope_theta=500.0) | {"layer_norm_eps": 0.05},
        {NORM: 0.05, "rope.dimension_count": 4, "rope.freq_base": 500.0,
         "use_parallel_residual": True},  # as a converter guesses
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
    "nemotron, linear": Case(
        "nemotron", rope(partial_rotary_factor=1.0, **LINEAR)
        | {"norm_eps": 0.05, "head_dim": 16, "attention_bias": True, "mlp_bias": True},
        {NORM: 0.05, RMS: 0.05} | scaled(type="linear", factor=8.0),
    ),
    "nemotron": Case(
        "nemotron", rope(partial_rotary_factor=0.5) | {"norm_eps": 0.05, "head_dim": 16},
        {NORM: 0.05, "rope.dimension_count": 8} | scaled(type="none"),
    ),
    "gpt2": Case(
        "gpt2",
        {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": LENGTH, "n_inner": 96,
         "layer_norm_epsilon": 0.05, "tie_word_embeddings": True},
        {NORM: 0.05, "attention.head_count_kv": 4},
    ),
    "qwen35": Case(
        "qwen35", HYBRID | rope(**MROPE) | {"rms_norm_eps": 0.05}, OF_HYBRID,
        model_type="qwen3_5_text",
    ),
    "qwen35, recurrent_layers": Case(
        "qwen35",
        HYBRID | rope(**MROPE)
        | {"rms_norm_eps": 0.05, "layer_types": [FULLY, *["linear_attention"] * 3]},
        OF_HYBRID | {"attention.recurrent_layers": [False, True, True, True]},
        model_type="qwen3_5_text",
    ),
    "qwen35, yarn": Case(
        "qwen35", HYBRID | rope(**MROPE, **YARN) | {"rms_norm_eps": 0.05}, OF_HYBRID | OF_YARN,
        model_type="qwen3_5_text",
    ),
    "qwen35moe": Case(
        "qwen35moe",
        HYBRID | MIXTURE | rope(**MROPE)
        | {"shared_expert_intermediate_size": 48, "rms_norm_eps": 0.05},
        OF_HYBRID | OF_MIXTURE | {"expert_shared_feed_forward_length": 48},
        model_type="qwen3_5_moe_text",
    ),
    "lfm2": Case(
        "lfm2",
        rope()
        | {"layer_types": ["conv", FULLY] * 2, "block_auto_adjust_ff_dim": False,
           "norm_eps": 0.05, "conv_L_cache": 3, "conv_bias": False},
        {"attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 3, RMS: 0.05,
         "rope.freq_base": 10000.0},
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
        if case.architecture.startswith("qwen35"):
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
        elif "shared_expert_gate" in name and case.model_type == "qwen3_5_moe_text":
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


def header(path, architecture, keys):
    """A writer with these keys under the architecture's name, each of the kind of its value."""
    writer = gguf.GGUFWriter(path, architecture)
    tell_tokens(writer, Path(TARGET), VOCAB)
    add_keys(writer, keys)
    return writer


def add_keys(writer, keys):
    for name, value in keys.items():
        key = f"{writer.arch}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            kinds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
            kinds.get(type(value), writer.add_float32)(key, value)


def write(path, case, model=None, **more):
    """The case's file; more keys may be added. Returns the original."""
    model = model or original(case)
    usual = {RMS: 1e-6} if NORM not in case.keys else {}
    if case.architecture == "phi3":
        usual[RMS] = 1e-5
    keys = KEYS | usual | case.keys | more
    extra = {name: keys.pop(name) for name in [*keys] if name.endswith((".weight", ".bias"))}
    weights = tensors_of(model, case)
    for name, values in extra.items():
        if values is None:  # what the original's frequencies are divided by
            rotary = model.get_decoder().rotary_emb
            usual = rotary.compute_default_rope_parameters(rotary.config)[0]
            values = (usual / rotary.inv_freq).numpy()
        weights[name] = np.asarray(values, np.float32)
    tensors = [(name, np.ascontiguousarray(values), "F32") for name, values in weights.items()]
    finish(header(path, case.architecture, keys), (), tensors)
    return model


@torch.no_grad()
def logits_of(model, length):
    ids = torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, use_cache=False).logits[0]


def loaded(path, length, is_packed):
    """The model of a file as the server has it, with transformers' modules."""
    with open_model(str(path)) as file:
        model, report = load_model(file, config_of(file), None if is_packed else torch.float32)
        check = gguf_check.check_of(file)
    check_weights(str(path), report)
    fix_rotations(model, length)
    check(model, length)
    return model


@pytest.mark.parametrize("name", CASES)
def test_a_file_s_logits_are_those_of_the_model_that_it_was_made_of(tmp_path, name):
    """Unpacked; and as it lies in the file, where the family's matrices can be."""
    start.setup(None, "cpu", True)
    case, path = CASES[name], tmp_path / "model.gguf"
    expected = logits_of(write(path, case), case.length)
    with open_model(str(path)) as file:
        ways = [False, True] if why_not_packed(file) is None else [False]
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


@pytest.mark.parametrize("name", ["rope_freqs", "yarn, all", "longrope, short", "gemma3"])
def test_what_is_served_is_what_the_original_writes(tmp_path, name):
    """Over the whole path: packed where there are kernels, the KV cache, drafts, batches."""
    case, path = CASES[name], tmp_path / "model.gguf"
    model = write(path, case)
    for dtype in ("auto", "float32"):
        options = Options(
            model=str(path), dtype=dtype, max_model_len=case.length, drafter="ngram", fixed_k=True
        )
        engine = core.load_engine(options)
        prompt = [5, 17, 2048, 99, 5, 17]
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None
        )[0, len(prompt) :].tolist()
        assert assert_lossless(engine, prompt, 20, "ngram").output == expected


# ------------------------------------------------------------------------ what is not dropped
def keys_of(part):
    """All keys that gguf knows under an architecture's name."""
    for value in vars(part).values():
        if isinstance(value, type):
            yield from keys_of(value)
        elif isinstance(value, str) and value.startswith("{arch}."):
            yield value.removeprefix("{arch}.")


FIRST = {case.architecture: case for case in reversed(CASES.values())}  # the first case of each


def config_with(path, case, tensors, **keys):
    """The config of a header with these keys more."""
    usual = {RMS: 1e-6} if NORM not in case.keys else {}
    writer = gguf.GGUFWriter(path, case.architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])
    add_keys(writer, KEYS | usual | case.keys | keys)
    finish(writer, (), [(name, np.zeros(1, np.float32), "F32") for name in tensors])
    with open_model(str(path)) as file:
        return config_of(file).to_dict()


@pytest.mark.parametrize("architecture", [*gguf_config.FAMILIES, *GGUF_CONFIG_ARCHS])
def test_each_key_that_gguf_knows_is_applied_or_refused(tmp_path, architecture):
    """A key with another value changes the config, or is named in a refusal."""
    case, path, dropped = FIRST[architecture], tmp_path / "model.gguf", set()
    tensors = tensors_of(original(case), case).keys()
    config = config_with(path, case, tensors)
    for key in {*keys_of(gguf.Keys)} - set(gguf_config.NO_EFFECT):
        try:
            if config_with(path, case, tensors, **{key: 24}) == config:
                dropped.add(key)
        except Exception as error:  # of transformers, where such a model cannot be
            is_ours = isinstance(error, BadFile)
            assert not is_ours or key in str(error), (key, str(error))
    assert not dropped


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("llama", {"dreams": 1}, "'llama.dreams' is 1, which llama has not here"),
        ("llama", {"blk.1.dream.weight": [1.0]}, "reads its tensor 'blk.1.dream.weight'"),
        ("llama", {"blk.1.attn_q.bias": [1.0] * 64}, "reads its tensor 'blk.1.attn_q.bias'"),
        ("lfm2", {"blk.1.dream.weight": [1.0]}, "reads its tensor 'blk.1.dream.weight'"),
        ("llama", {"rope_factors_long.weight": LONG}, "lacks a list of factors"),
        ("phi3", FACTORS | {"rope_freqs.weight": LONG}, "scaled in two ways"),
        ("yarn", {"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
        ("yarn", {"rope.scaling.yarn_attn_factor": 1.0}, "yarn_attn_factor is 1.0"),
        ("llama", {"rope.scaling.type": "spiral"}, "'spiral', which is not known"),
        ("llama", {"attention.head_count": [4, 4, 4, 2]}, "head_count is \\[4, 4, 4, 2\\]"),
        ("llama", {"expert_count": 4}, "'llama.expert_count' is 4"),
        ("phi3", {"rope.dimension_count": 7}, "dimension_count is 7"),
    ],
)
def test_what_would_be_another_model_is_refused(tmp_path, name, more, reason):
    """In one line with its name, packed or not."""
    start.setup(None, "cpu", True)
    path = tmp_path / "model.gguf"
    write(path, CASES[name], **more)
    for dtype in ("auto", "float32"):
        with pytest.raises(StartError, match=reason) as error:
            load_pretrained(str(path), Options(dtype=dtype))
        assert "model.gguf" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "window"),
    [({"context_length": 4096}, 2047), ({"context_length": 16384}, None),
     ({"context_length": 4096, "attention.sliding_window": 0}, None)],
)  # fmt: skip
def test_early_files_of_phi_3_have_the_window_of_their_original(tmp_path, keys, window):
    tensors = tensors_of(original(CASES["phi3"]), CASES["phi3"])
    config = config_with(tmp_path / "model.gguf", CASES["phi3"], tensors, **keys)
    assert config["sliding_window"] == window


class Counted(str):
    """A key that counts how often it is compared or taken apart."""

    count = 0

    def removeprefix(self, prefix):
        Counted.count += 1
        return super().removeprefix(prefix)

    def startswith(self, *prefix):
        Counted.count += 1
        return super().startswith(*prefix)


def test_each_of_many_keys_is_looked_at_a_few_times(tmp_path):
    """60,000 keys took 25 s where each was searched among the others."""
    path, case = tmp_path / "model.gguf", CASES["llama"]
    write(path, case)
    with open_model(str(path)) as file:
        file.metadata |= {Counted(f"general.key{i}"): i for i in range(60_000)}
        config_of(file)
    assert 60_000 <= Counted.count <= 5 * 60_000


@pytest.mark.parametrize("family", ["falcon", "gemma4", "gpt-oss", "mamba", "minimax-m2"])
def test_a_family_whose_keys_are_not_known_is_refused(tmp_path, family):
    path = tmp_path / "model.gguf"
    finish(
        header(path, family, KEYS), (), [(name, np.zeros(1, np.float32), "F32") for name in "abcd"]
    )
    with pytest.raises(StartError, match=f"kind '{family}' are not read from GGUF files"):
        load_pretrained(str(path), Options())


FAULTS = {  # a fault of the first reading, and what the second one finds
    "rope_freqs": ("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}, "rotation"),
    "yarn": ("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}, "rotation"),
    "epsilon": ("rms_norm_eps", 1e-6, "the epsilon of model.layers.0.input_layernorm"),
    "gemma2": ("query_pre_attn_scalar", 256, "the scale of model.layers.0.self_attn"),
    "gemma2, caps": ("attn_logit_softcapping", 50.0, "the cap of model.layers.0.self_attn"),
    "gemma3": ("sliding_window", 4096, "the window of model.layers.0.self_attn"),
    "gemma3, all": ("rope_parameters", rotated()["rope_parameters"], "rotation"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_header_that_was_read_wrongly_is_seen_before_the_model_is_served(
    tmp_path, monkeypatch, name
):
    """By a second reading: the comparison with transformers has the wrong config on both sides."""
    path, (config_field, wrong, what) = tmp_path / "model.gguf", FAULTS[name]
    write(path, CASES[name])

    def misread(file):
        config = config_of(file)
        setattr(config, config_field, wrong)
        return config

    monkeypatch.setattr(loading, "config_of", misread)
    with pytest.raises(StartError, match=f"{what}.* of the loaded model is not what the file's"):
        load_pretrained(str(path), Options(dtype="float32"))


def test_a_text_ends_where_the_file_says(tmp_path):
    """A config of transformers would have Llama 2's token 2 end it."""
    case, path = CASES["llama"], tmp_path / "model.gguf"
    writer = header(path, "llama", KEYS | {RMS: 1e-6})
    writer.add_eot_token_id(7)
    weights = tensors_of(original(case), case)
    finish(writer, (), [(name, own.copy(), "F32") for name, own in weights.items()])
    loaded = load_pretrained(str(path), Options())
    assert loading.ends_of(loaded.model, loaded.tokenizer) == {0, 7}
