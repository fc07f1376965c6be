"""GGUF files for the tests: models of transformers as llama.cpp's converter writes them.

    model = write(path, Case("qwen3"), kind=Q8_0)  # the file, and the original that it holds

A case states what a model's config has beside SMALL, and which keys of a header say so. It knows
nothing of how this project reads a header. More cases are in test_gguf_config.py.
"""

import json
import re
import struct
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import torch
from conftest import TARGET
from families import randomise
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as Value
from transformers import AutoConfig, AutoModelForCausalLM

from tools.training.heads import write_gguf as finish

Q4_0, Q8_0 = Kind.Q4_0, Kind.Q8_0

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


@dataclass(eq=False)
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


TINY = Case(  # with room for the texts of other tests
    "llama", {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
              "max_position_embeddings": 256})  # fmt: skip


@cache
def original(case):
    """The model of transformers that a case is about, with random weights."""
    torch.manual_seed(0)
    is_tied = case.architecture.startswith("gemma")  # always, in llama.cpp
    fields = SMALL | {"tie_word_embeddings": is_tied} | case.config
    model_type = MODEL_TYPES.get(case.architecture, case.architecture)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields)).eval()
    randomise(model)
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


def write(path, case, kind=None, more=(), tokenizer=None, **options):
    """Write a case's file, its matrices in `kind` or float32. Returns the original.

    `more` has keys, and tensors by names that end in .weight or .bias: numbers, (blocks, their
    kind), or None for one that is left out. `options` are the writer's.
    """
    model, keys = original(case), case.header(**dict(more))
    tensors = tensors_of(model, case.architecture)
    tensors |= {name: keys.pop(name) for name in [*keys] if name.endswith((".weight", ".bias"))}
    if tensors.get("rope_freqs.weight", ()) is None:  # what frequencies are divided by
        rotary = model.get_decoder().rotary_emb
        usual = rotary.compute_default_rope_parameters(rotary.config)[0]
        tensors["rope_freqs.weight"] = (usual / rotary.inv_freq).numpy()
    writer, floats = gguf.GGUFWriter(path, case.architecture, **options), []
    add_keys(writer, "general", {"name": "tiny"})
    add_keys(writer, case.architecture, keys)
    tokenizer = tokenizer_of_target(keys["vocab_size"]) | (tokenizer or {})
    add_keys(writer, "tokenizer.ggml", tokenizer)
    for name, values in tensors.items():
        if values is None:
            continue
        if isinstance(values, tuple):
            writer.add_tensor(name, values[0], raw_dtype=values[1])
            continue
        values = np.ascontiguousarray(values, np.float32)
        is_packed = kind and values.ndim > 1 and "ffn_gate_inp." not in name
        floats.append((name, values, kind.name if is_packed else "F32"))
    finish(writer, (), floats)
    return model


def text(value):
    """A text as a header has it: its length, and its bytes."""
    value = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(value)) + value


def is_short_line(message):
    return message.isprintable() and len(message) <= 300
