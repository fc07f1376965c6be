"""Small random models of every family of causal language models.

One table of field names makes the config of any family small; OVERRIDES has what a family needs
besides. All parameters are random, norms and biases too, as ones and zeros hide faults.
"""

from pathlib import Path
from typing import Any

import torch
from conftest import TARGET
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

CONTEXT, WINDOW = 384, 12
_LAYERS, _HEADS, _WIDTH, _INNER = 4, 4, 64, 96
_SMALL: dict[str, Any] = {
    field: value
    for fields, value in (
        ("hidden_size d_model n_embd emb_dim word_embed_proj_dim embedding_size", _WIDTH),
        ("input_embedding_size output_embedding_size", _WIDTH),
        ("intermediate_size n_inner dff ffn_dim dim_ff decoder_ffn_dim encoder_ffn_dim", _INNER),
        ("shared_intermediate_size", _INNER),
        ("num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers", _LAYERS),
        ("num_decoder_layers", _LAYERS),
        ("num_attention_heads n_head n_heads num_heads decoder_attention_heads", _HEADS),
        ("encoder_attention_heads num_experts num_local_experts n_routed_experts", 4),
        ("max_position_embeddings n_positions n_ctx max_seq_len", CONTEXT),
        ("moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank", 32),
        ("hidden_size_per_layer_input", 32),
        ("qk_nope_head_dim v_head_dim head_dim", 16),
        ("bos_token_id eos_token_id pad_token_id decoder_start_token_id", 0),
        ("vocab_size vocab_size_per_layer_input", 4096),
        ("num_key_value_heads num_experts_per_tok n_group mamba_n_groups", 2),
        ("topk_group", 1),
        ("qk_rope_head_dim", 8),
        ("linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim", 16),
        ("linear_num_key_heads", 2),
        ("linear_num_value_heads ssm_state_size", 4),
        ("mamba_n_heads mamba_num_heads mamba_d_state", 8),
        ("sliding_window", WINDOW),
        ("is_decoder", True),
    )
    for field in fields.split()
}
_BOTH = ["sliding_attention", "full_attention"] * 2
OVERRIDES: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "dots1": {"n_shared_experts": 1},
    "falcon": {"head_dim": None},
    "gemma3n_text": {"layer_types": _BOTH, "num_kv_shared_layers": 2},
    "gptj": {"rotary_dim": 8},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "gemma4_text": {"layer_types": _BOTH, "num_kv_shared_layers": 2},
    **dict.fromkeys(("lfm2", "lfm2_moe"), {"layer_types": ["conv", "full_attention"] * 2}),
    "bamba": {"attn_layer_indices": [1, 3]},
    "falcon_h1": {"mamba_d_ssm": 128},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "qwen2": {"use_sliding_window": True, "layer_types": _BOTH},
}


def small_config(name: str) -> Any:
    """A small config of the type. Raises whatever the type has against it."""
    config_class = type(CONFIG_MAPPING[name]().get_text_config())
    known = {*config_class().to_dict(), "is_decoder"}
    fields = {k: v for k, v in _SMALL.items() if k in known}
    if "qk_rope_head_dim" in fields:  # there heads share nothing, and rotate these alone
        fields |= {"head_dim": fields["qk_rope_head_dim"], "num_key_value_heads": _HEADS}
    fields |= OVERRIDES.get(name, {})
    config = config_class(**{k: v for k, v in fields.items() if v is not None})
    if set(getattr(config, "layer_types", None) or []) == {"sliding_attention"}:
        config = config_class(**fields | {"layer_types": _BOTH})
    return config


@torch.no_grad()
def randomise(model: Any) -> None:
    """Norms about 1, biases about 0, the rest as large as keeps a state's size."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
        elif "norm" in name or "ln" in name:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0, 0.2)


def save_small(name: str, folder: Path, **changes: Any) -> Any:
    """Write a small random model of the type, with a tokenizer, to a folder; returns its config."""
    torch.manual_seed(0)
    config = small_config(name)
    for field, value in changes.items():
        setattr(config, field, value)
    model = AutoModelForCausalLM.from_config(config)
    randomise(model)
    model.generation_config.eos_token_id = None  # texts then have one length
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(folder)
    return config
