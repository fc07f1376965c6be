"""Multi-token prediction: extra layers of the target, one per draft step (DeepSeek-V3).

    embedding of the next token [D] ─ norm ─┐
    the target's last state [D] ───── norm ─┴→ eh_proj ─→ decoder layer ─ norm ─→ h' ─ lm_head ─→ d₁
                                                                   the next step's state ┘

Weights: transformers' MtpModel, from the target's checkpoint, or from one of the same layout
that was trained for a target without such layers: `--mtp FOLDER`. head.py has how a head drafts.

Source: arXiv 2412.19437. Not covered: layers with a window of attention.
"""

import re
from copy import copy, deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_layers import MtpModel

from runtime import kernels
from runtime.cache import Placement
from runtime.models.files import unmap_weights, why_not_loaded
from runtime.models.weights import check_numbers, check_sizes, read_folder, reading
from runtime.values import Model

from .base import Context
from .head import AutoregressiveDrafter

# What configs call the number of MTP layers: transformers' name, then Qwen's and GLM's.
_COUNTS = "num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers"
# Parts of a layer in transformers' words, and in MiMo's. The rest of it is "mtp_block".
MIMO = {
    "enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj",
    "post_norm": "final_layernorm",
}  # fmt: skip
_MIMO_LAYER = r"^mtp_layers\.(\d+)\."  # what stands before, behind "model."


class MtpDrafter(AutoregressiveDrafter):
    """Drafts with the target's MTP head, batched over requests."""

    name: ClassVar[str] = "mtp"
    rank = 0
    output = "shared_head"

    @staticmethod
    def kernel_of(head: nn.Module, number: int, length: int) -> Any:
        return kernels.mtp_layer(head, number, length, run_layer)

    @classmethod
    def build(cls, context: Context) -> "MtpDrafter":
        """Raises ValueError if there is no MTP head, or one that cannot be loaded."""
        model, words = context.target.model, None
        name = context.target.name if context.mtp is None else context.mtp
        if context.mtp is not None:
            with reading(f"MTP head {name}"):
                model, words = _read_host(name, context.target)
        text = model.config.get_text_config()
        num_layers = next((n for name in _COUNTS if (n := getattr(text, name, None))), 0)
        if not num_layers:
            raise ValueError(
                f"{name} has no MTP head (no num_mtp_layers in config): use --drafter ngram or "
                "draft_model, or a checkpoint that has one"
            )
        try:
            head = _load(model, num_layers)
            check_numbers(head.layers)  # the rest is the target's
        except Exception as error:  # a family that registers no MTP weights may raise anything
            reason = why_not_loaded(error)
            raise ValueError(f"the MTP head of {name} could not be loaded: {reason}") from error
        head.to(context.target.model.device).eval().set_attn_implementation(
            model.config._attn_implementation
        )
        unmap_weights(head)
        if words is not None:
            head.shared_head = _rows_of(head.shared_head, words)
        return cls(head, context, words, is_target_s=context.mtp is None)

    def _scores(self, outputs: Tensor) -> Tensor:
        return self._head._project_to_logits(outputs[None])[0]

    def _run(self, embeds: Tensor, hidden: Tensor, place: Placement, layer: int) -> Tensor:
        """Layer i's pair j of a text stands at position j + i + 1, and in its cache's slot j."""
        at, mask = place.positions + layer + 1, place.mask(embeds.dtype)
        return run_layer(self._head, layer, embeds, hidden, at, mask, self._caches[layer])


def run_layer(
    head: nn.Module, number: int, embeds: Tensor, states: Tensor, positions: Tensor, mask: Tensor,
    cache: Any = None,
) -> Tensor:  # fmt: skip
    """What comes out of an MTP head's modules [B, T, D], of embeds and states [B, T, D]."""
    options = {"layer_type": head.config.layer_types[number]} if head.has_per_layer_rope else {}
    output = head.layers[number](
        embeds, states.to(embeds.dtype),
        position_embeddings=head.rotary_emb(embeds, positions, **options), attention_mask=mask,
        position_ids=positions, past_key_values=cache,
    )  # fmt: skip
    return head.shared_post_norm(output) if head.use_shared_post_norm else output


def _load(model: PreTrainedModel, num_layers: int) -> MtpModel:
    """The MTP layers of a target, whose config says in transformers' words what they are.

    Where it does not, a copy of the target is told: of its config, and of what it says of weights.
    """
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    model = copy(model)  # its modules are the target's
    model.config = deepcopy(model.config)
    text = model.config.get_text_config()
    text.num_mtp_layers = num_layers
    for name, kind in {"layer_types": "full_attention", "mlp_layer_types": "sparse"}.items():
        if getattr(text, name, None) and not getattr(text, f"mtp_{name}", None):
            setattr(text, f"mtp_{name}", [kind] * num_layers)
    # Some families store MTP layers as further numbered layers; transformers knows the numbers
    # of the published checkpoints only.
    if any(re.match(r"model\\\.layers", pattern) for pattern in ignored):
        numbers = range(text.num_hidden_layers, text.num_hidden_layers + num_layers)
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{n}\." for n in numbers]
    if any("mtp_layers" in pattern for pattern in ignored):
        text.mtp_hidden_states_first = True
        names = {f"{theirs}\\.": f"{ours}." for ours, theirs in MIMO.items()}
        names["eh_proj\\."] = "eh_proj."  # transformers renames a part of it
        names[""] = "mtp_block."  # of what is left
        renamed = [
            WeightRenaming(_MIMO_LAYER + old, rf"layers.\1.{new}") for old, new in names.items()
        ]
        model._weight_conversions = [*(getattr(model, "_weight_conversions", None) or []), *renamed]
    return MtpModel.from_pretrained(model)


def _read_host(name: str, target: Model) -> tuple[PreTrainedModel, Tensor | None]:
    """The host of a checkpoint, and the ids of the words that its layers may draft.

    A draft vocabulary is marked by `t2d`, [V] of bools, as in heads of EAGLE-3; None: all words.
    """
    _, weights = read_folder(name, allow_pickle=None)
    config = AutoConfig.from_pretrained(name)
    check_sizes(config.hidden_size, config.vocab_size, target)
    config.dtype = target.model.dtype
    if (words := weights.get("t2d")) is not None:
        if words.shape != (config.vocab_size,):
            raise ValueError(f"t2d is {list(words.shape)} instead of [{config.vocab_size}]")
        if not words.any():
            raise ValueError("t2d marks no word that the head may draft")
        words = words.nonzero()[:, 0]
    return host_of(config, target.model), words


def host_of(config: PreTrainedConfig, target: PreTrainedModel) -> PreTrainedModel:
    """A model to read MTP layers for that are not the target's: it has the target's two ends.

    What lies between them has no weights.
    """
    with torch.device("meta"):
        host = AutoModelForCausalLM.from_config(config)
    host.set_input_embeddings(target.get_input_embeddings())
    host.lm_head, decoder = target.get_output_embeddings(), host.get_decoder()
    decoder.rotary_emb = type(decoder.rotary_emb)(config)  # its tables are no weights
    return host


def _rows_of(output: nn.Module, words: Tensor) -> nn.Linear:
    """An output layer of these words alone."""
    panels, dtype = getattr(output, "panels", None), output.weight.dtype
    rows = output.weight[words] if panels is None else panels.rows(words).to(dtype)
    layer = nn.Linear(rows.shape[1], len(words), bias=False, device="meta")
    layer.weight = nn.Parameter(rows, requires_grad=False)
    return layer
