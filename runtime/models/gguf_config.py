"""A GGUF file's header as a config of transformers: each key is applied, or refused.

    llama.rope.scaling.factor = 8.0  ->  LlamaConfig(rope_parameters={"rope_type": "linear", …})

A key that changes the model and is not read gives another model, which writes plausible texts. So
`_Keys` notes what is read. A key under the architecture's name that nothing has read is refused,
unless its value is the one that changes nothing (`NEUTRAL`) or no value does (`NO_EFFECT`).

Some numbers stand in llama.cpp's code, and no key has them: they are `facts` of a family here.
Sources: gguf.constants.Keys; src/models/ and conversion/ of https://github.com/ggml-org/llama.cpp.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, PreTrainedConfig
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, get_gguf_config

from .gguf_file import BadFile, GgufFile, Texts

_MOST_VALUES = 4096  # of an array that describes a model, such as one number for each layer
_RMS, _NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_SIZES = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
}  # fmt: skip
_EXPERTS = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size", "expert_weights_norm": "norm_topk_prob",
}  # fmt: skip
_CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_WINDOW = {"attention.sliding_window": "sliding_window"}
NO_EFFECT = {  # keys whose value is of no effect, and why
    "rope.scaling.original_context_length": "it only tells how rotations are scaled",
    "rope.scaling.finetuned": "it says how the model was trained",
    "tensor_data_layout": "the layout of a family's tensors is known",
    "use_parallel_residual": "converters guess it; a second norm of a layer tells",
}
NEUTRAL = {  # by key, the values that change nothing; any other value is refused
    **dict.fromkeys((
        "attention.clamp_kqv attention.max_alibi_bias attention.scale attention.shared_kv_layers "
        "attention.sliding_window attn_logit_softcapping expert_count expert_used_count "
        "expert_weights_norm final_logit_softcapping leading_dense_block_count pooling_type "
        "rope.scaling.alpha rope.scaling.yarn_log_multiplier router_logit_softcapping swin_norm"
    ).split(), (0,)),
    **dict.fromkeys((
        "attention.temperature_scale embedding_scale expert_gating_func expert_group_count "
        "expert_group_used_count expert_shared_count expert_weights_scale logit_scale "
        "residual_scale"
    ).split(), (0, 1)),
    "attention.causal": (True,), "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,), "rope.scaling.yarn_beta_slow": (1,),
    "rope.scaling.yarn_ext_factor": (0, -1),  # -1: as the type says
}  # fmt: skip
FACTORS = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
_UNUSED = re.compile(r"blk\.\d+\.attn_rot_embd\.weight")  # frequencies that can be computed


@dataclass(frozen=True)
class Family:
    """What transformers calls a family of models and its numbers."""

    model_type: str
    fields: Mapping[str, str]  # a key's name behind the architecture -> the config's name
    facts: Mapping[str, Any] = field(default_factory=dict)  # where no key is, this is the value
    biases: Mapping[str, str] = field(default_factory=dict)  # the config's name -> whose bias it is
    turns_part: bool = False  # whether a head may be rotated in part
    pattern: int | None = None  # every so many layers one has no window


_LLAMA = {**_SIZES, _RMS: "rms_norm_eps"}
_QKV_O = {"attention_bias": "attn_q"}
FAMILIES = {
    "llama": Family("llama", _LLAMA, biases=_QKV_O | {"mlp_bias": "ffn_gate"}),
    "qwen2": Family("qwen2", _LLAMA),
    "qwen2moe": Family(
        "qwen2_moe", _LLAMA | _EXPERTS
        | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        {"norm_topk_prob": False},
    ),
    "qwen3": Family("qwen3", _LLAMA, biases=_QKV_O),
    "qwen3moe": Family("qwen3_moe", _LLAMA | _EXPERTS, {"norm_topk_prob": True}, _QKV_O),
    "phi3": Family("phi3", _LLAMA | _WINDOW, turns_part=True),
    "gemma2": Family(
        "gemma2", _LLAMA | _CAPS,
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096},
        pattern=2,
    ),
    "gemma3": Family("gemma3_text", _LLAMA | _CAPS, pattern=6),
    "stablelm": Family(
        "stablelm",
        _SIZES | {_NORM: "layer_norm_eps"}, biases={"use_qkv_bias": "attn_q"}, turns_part=True,
    ),
    "starcoder2": Family("starcoder2", _SIZES | _WINDOW | {_NORM: "norm_epsilon"}),
    "nemotron": Family(
        "nemotron", _SIZES | {_NORM: "norm_eps", _RMS: "norm_eps"},  # files have both
        biases=_QKV_O | {"mlp_bias": "ffn_up"}, turns_part=True,
    ),
    "gpt2": Family("gpt2", {
        "context_length": "n_positions", "embedding_length": "n_embd", "block_count": "n_layer",
        "feed_forward_length": "n_inner", "attention.head_count": "n_head",
        _NORM: "layer_norm_epsilon",
    }),
}  # fmt: skip
_HEADS = ("hidden_size", "n_embd"), ("num_attention_heads", "n_head")
_OPTIONAL = {"num_key_value_heads", "sliding_window", *_CAPS}


class _Keys(dict[str, Any]):
    """A file's keys, with those noted that have been read."""

    def __init__(self, file: GgufFile) -> None:
        super().__init__({key: _brief(value) for key, value in file.metadata.items()})
        self.file, self.architecture = file, file.metadata["general.architecture"]
        self.was_read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.was_read.add(key)
        if key not in self:
            raise self.bad(f"its header lacks {key!r:.80}")
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def take(self, name: str, default: Any) -> Any:
        """The value of a key under the architecture's name, of the default's kind.

        Raises BadFile for a value of another kind, and if one number for each layer is needed.
        """
        value = self.get(f"{self.architecture}.{name}", default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]  # the same for each layer
        kinds = {float: (int, float)}.get(type(default), (type(default),))
        if default is not None and type(value) not in kinds:
            raise self.bad(f"{self.architecture}.{name} is {value!r:.80}, which is not read")
        return value

    def bad(self, reason: str) -> BadFile:
        return BadFile(f"{self.file.name} cannot be served: {reason}")

    def refuse_the_rest(self) -> None:
        """Raises BadFile for a key that would change the model and has not been read."""
        prefix = f"{self.architecture}."
        for key in sorted(self.keys() - self.was_read):
            name, value = key.removeprefix(prefix), super().__getitem__(key)
            is_neutral = not isinstance(value, list) and value in NEUTRAL.get(name, ())
            if key.startswith(prefix) and name not in NO_EFFECT and not is_neutral:
                what = f"{key!r:.80} is {value!r:.80}, which {self.architecture} has not here"
                raise self.bad(f"{what} (give the model's folder or hub id instead)")


def config_of(file: GgufFile) -> PreTrainedConfig:
    """The model's config. Raises BadFile for a family, a key or a value that cannot be applied."""
    keys = _Keys(file)
    architecture = keys.architecture
    length = keys.take("context_length", 0)
    if architecture in GGUF_CONFIG_ARCHS:
        keys["tokenizer.ggml.tokens"] = len(file.metadata["tokenizer.ggml.tokens"])
        fields = get_gguf_config(keys, tuple(file.tensors))
        if layers := keys.get(f"{architecture}.attention.recurrent_layers"):
            kinds = ["linear_attention" if is_one else "full_attention" for is_one in layers]
            fields["layer_types"] = kinds[: fields["num_hidden_layers"]]
        fields["rope_parameters"] |= _scaling(keys, length)
    elif architecture in FAMILIES:
        fields = _fields(keys, FAMILIES[architecture], length)
    else:
        raise keys.bad(
            f"models of the kind {architecture!r:.80} are not read from GGUF files "
            "(give the model's folder or hub id instead)"
        )
    fields["vocab_size"] = keys.take("vocab_size", len(file.metadata["tokenizer.ggml.tokens"]))
    width, heads = (fields.get(new, fields.get(old)) for new, old in _HEADS)
    head = keys.take("attention.key_length", fields.get("head_dim", width // heads))
    if "head_dim" not in fields and head * heads != width:
        what = f"attention.key_length is {head}, and attention.head_count {heads}"
        raise keys.bad(f"{what}: their product must be embedding_length, {width}")
    if head != (value := keys.take("attention.value_length", head)):
        what = f"attention.value_length is {value}, and attention.key_length {head}"
        raise keys.bad(f"{what}: they must be equal")
    keys.refuse_the_rest()
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):  # or another model's
        index = file.metadata.get(f"tokenizer.ggml.{key}_token_id", -1)
        fields[f"{name}_token_id"] = index if 0 <= index < fields["vocab_size"] else None
    config = AutoConfig.for_model(**fields)
    config._name_or_path = Path(file.name).stem
    return config


def refuse_unread(file: GgufFile, was_read: Iterable[str], num_layers: int) -> None:
    """Raises BadFile for a tensor that nothing reads; layers of an MTP head need not be read."""
    for name in sorted(file.tensors.keys() - {*was_read, *FACTORS}):
        block = re.match(r"blk\.(\d+)\.", name)
        if not (block and int(block[1]) >= num_layers or _UNUSED.fullmatch(name)):
            architecture = file.metadata["general.architecture"]
            what = f"nothing reads its tensor {name!r:.80}, which {architecture} has not here"
            raise BadFile(f"{file.name} cannot be served: {what} (give the model's folder instead)")


def _fields(keys: _Keys, family: Family, length: int) -> dict[str, Any]:
    """What the config of a family of FAMILIES is made of."""
    fields: dict[str, Any] = {"model_type": family.model_type, **family.facts}
    tensors = keys.file.tensors
    for key, name in family.fields.items():
        value = keys.take(key, family.facts.get(name))
        if value is None and key == _RMS and name in fields:
            continue  # the other epsilon is there
        if value is None and name not in _OPTIONAL:
            raise keys.bad(f"its header lacks {keys.architecture}.{key}")
        if isinstance(value, str | list):
            raise keys.bad(f"{keys.architecture}.{key} is {value!r:.80}, and a number is needed")
        if key == _RMS and value != fields.get(name, value):
            raise keys.bad(f"its {key} is {value}, and its {_NORM} {fields[name]}")
        if value is not None:
            fields[name] = value or (None if name in _OPTIONAL else value)
    layers = fields.get("num_hidden_layers", fields.get("n_layer"))
    if heads := keys.take("nextn_predict_layers", 0):  # for MTP, counted as layers
        fields["num_hidden_layers"] = layers = layers - heads
    fields["tie_word_embeddings"] = "output.weight" not in tensors
    if family.model_type == "stablelm":
        fields["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in tensors
    if family.model_type == "phi3" and length == 4096:  # early files do not have their window
        fields.setdefault("sliding_window", 2047)
    for name, matrix in family.biases.items():
        fields[name] = f"blk.0.{matrix}.bias" in tensors
    if family.model_type == "gpt2":  # positions are learned, and heads share nothing
        if keys.take("attention.head_count_kv", fields["n_head"]) != fields["n_head"]:
            raise keys.bad("attention.head_count_kv differs from attention.head_count")
        return fields
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    fields["num_key_value_heads"] = fields.get("num_key_value_heads") or heads
    fields["head_dim"] = head = keys.take("attention.key_length", width // heads)
    rotation = {"rope_theta": keys.take("rope.freq_base", 10000.0)}
    turned = keys.take("rope.dimension_count", head)
    if family.turns_part:
        rotation["partial_rotary_factor"] = turned / head
    if turned % 2 or turned != int(head * rotation.get("partial_rotary_factor", 1.0)):
        raise keys.bad(f"rope.dimension_count is {turned} and heads have {head} numbers")
    rotation |= _scaling(keys, length)
    if family.model_type == "phi3" and "original_max_position_embeddings" in rotation:
        fields["original_max_position_embeddings"] = rotation["original_max_position_embeddings"]
    fields["rope_parameters"] = rotation
    if family.pattern:
        _alternate(keys, fields, family.pattern, layers)
    return fields


def _alternate(keys: _Keys, fields: dict[str, Any], every: int, layers: int) -> None:
    """Gemma's layers: most of them have a window, and in Gemma 3 those rotate otherwise."""
    head, base = fields["head_dim"], fields["rope_parameters"]["rope_theta"]
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    is_third = fields["model_type"] == "gemma3_text"
    # The model of 27 billion weights is scaled otherwise, and only its layers tell.
    is_27b = layers == (62 if is_third else 46)
    fields["query_pre_attn_scalar"] = width // heads if is_27b else head
    window = keys.take("attention.sliding_window", fields.get("sliding_window", 0))
    pattern = keys.get(f"{keys.architecture}.attention.sliding_window_pattern", every)
    if isinstance(pattern, int):
        pattern = [i % pattern < pattern - 1 if pattern else True for i in range(layers)]
    kinds = "full_attention", "sliding_attention"
    fields["layer_types"] = [kinds[bool(window and has_one)] for has_one in pattern[:layers]]
    fields["sliding_window"] = window or fields["max_position_embeddings"]
    local = keys.take("rope.freq_base_swa", 10000.0 if is_third else base)
    if keys.take("rope.dimension_count_swa", head) != head or not (is_third or local == base):
        raise keys.bad("rope.freq_base_swa or rope.dimension_count_swa is not as this family's")
    if is_third:
        unscaled = {"rope_type": "default", "rope_theta": local}
        fields["rope_parameters"] = {kinds[0]: fields["rope_parameters"], kinds[1]: unscaled}


def _scaling(keys: _Keys, length: int) -> dict[str, Any]:
    """How rotations are scaled for long texts, in transformers' words.

    transformers calls factors for each frequency longrope. Llama 3's files have one list of them,
    so both lists of longrope are that one.
    """
    kind = keys.take("rope.scaling.type", "linear")
    factor = keys.take("rope.scaling.factor", keys.take("rope.scale_linear", 0.0)) or 1.0
    factor = 1.0 if kind == "none" else factor
    original = keys.take("rope.scaling.original_context_length", length)
    size = keys.take("rope.scaling.attn_factor", 1.0)
    freqs, short, long = (_numbers(keys.file, name) for name in FACTORS)
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise keys.bad(f"rope.scaling.type is {kind!r:.80}, which is not known")
    if (short is None) != (long is None) or (kind == "longrope" and short is None):
        raise keys.bad("it lacks a list of factors for its rotations")
    if (freqs or short) and (kind == "yarn" or freqs and short or short and factor != 1.0):
        raise keys.bad("its rotations are scaled in two ways")
    if kind == "yarn" and factor != 1.0:
        if (extent := keys.take("rope.scaling.yarn_ext_factor", 1.0)) not in (1, -1):
            raise keys.bad(f"rope.scaling.yarn_ext_factor is {extent}, and only 1 is applied")
        usual_size = 1 + 0.1 * log(max(factor, 1.0))
        attn_factor = keys.take("rope.scaling.yarn_attn_factor", usual_size)
        if attn_factor == 1.0:  # llama.cpp writes it for the usual size, and converters for 1
            raise keys.bad("rope.scaling.yarn_attn_factor is 1.0, which may mean two models")
        return {
            "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
            "attention_factor": size * attn_factor,
            "beta_fast": keys.take("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.take("rope.scaling.yarn_beta_slow", 1.0),
        }  # fmt: skip
    if not freqs and not short:
        if size != 1.0:
            raise keys.bad("rope.scaling.attn_factor is given where rotations are not scaled")
        is_scaled = factor != 1.0
        return {"rope_type": "linear", "factor": factor} if is_scaled else {"rope_type": "default"}
    factors = freqs and [factor * each for each in freqs]
    return {
        "rope_type": "longrope", "short_factor": short or factors, "long_factor": long or factors,
        "original_max_position_embeddings": original if short else length,
        "attention_factor": size, "factor": 1.0,
    }  # fmt: skip


def _numbers(file: GgufFile, name: str) -> list[float] | None:
    """The numbers of a small tensor in float32; None if there is none."""
    if (tensor := file.tensors.get(name)) is None:
        return None
    if tensor.type.name != "F32" or tensor.num_bytes > 4 * _MOST_VALUES:
        raise BadFile(f"{file.name}: {name} is no short list in float32")
    return file.read(tensor).view(np.float32).tolist()


def _brief(value: Any) -> Any:
    """A value as a config needs it: of a vocabulary none of its texts and few of its numbers."""
    if isinstance(value, Texts):
        return []
    return value[:_MOST_VALUES].tolist() if isinstance(value, np.ndarray) else value
