"""EAGLE-3: a small head, trained for one target, that reads the target's states of three layers.

    states of three layers [3 D] ─ fc ─→ h [D] ─┐
    embedding of the next token [D] ────────────┴→ decoder layer ─→ h' ─ norm ─ lm_head ─→ token
                                                                   └→ the next step's h

Attention reads both halves, the embedding and the state, each behind a norm; its result is added to
the state alone. lm_head knows a draft vocabulary, the commonest words: d2t says how far each of its
ids is from the target's. Its scores are laid out over the target's vocabulary before anything is
drawn from them, so that q is a distribution over the same tokens as p.

head.py has how a head drafts. Train one with tools/train.py, or take a public one:
`--eagle3 FOLDER_OR_HUB_ID`.

Sources: arXiv 2503.01840; the layouts of SafeAILab/EAGLE and of vllm-project/speculators.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from runtime import kernels
from runtime.cache import Placement
from runtime.models.weights import check_config, check_sizes, fill
from runtime.values import Model

from .base import Context
from .head import AutoregressiveDrafter, check_layers, layer_config

_LAYERS = {"llama": llama.LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Fields that change what a head computes, each with the one value that is served.
_ONLY = {
    "speculators_model_type": "eagle3",
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_drafting": False,
}
# What a file may have beside the head: the inverse of d2t, and parts of the target.
_UNUSED = {"t2d", "verifier_norm.weight", "verifier_lm_head.weight"}


@dataclass(frozen=True)
class HeadConfig:
    """What config.json says of a head, in either layout."""

    layer: PreTrainedConfig  # of the decoder layer; has the sizes
    draft_vocab_size: int
    target_hidden_size: int
    layer_ids: tuple[int, ...]  # of the target's, whose inputs are read
    verifier: str | None  # the target that the head was trained for
    norm_before_residual: bool = False  # the normed state is what attention's result is added to
    norm_before_fc: bool = False  # one norm over all states
    fc_norm: bool = False  # one norm for each of them
    norm_output: bool = False  # the normed state is the next step's

    @classmethod
    def of(cls, content: dict[str, Any], num_layers: int) -> "HeadConfig":
        """Read either layout's config.json, for a target of so many layers.

        Raises ValueError for what is not supported.
        """
        sizes = content.get("transformer_layer_config", content)
        if "hidden_size" not in sizes:
            raise ValueError("config.json has no hidden_size: is this an EAGLE-3 head?")
        if (family := sizes.get("model_type", "llama")) not in _LAYERS:
            raise ValueError(f"model_type is {family!r}: supported are {', '.join(_LAYERS)}")
        layer = layer_config(sizes, family)
        check_config(vars(layer), {"num_hidden_layers": 1, "use_sliding_window": False})
        content = content | (content.get("eagle_config") or {})  # as some write the first layout
        check_config(content, _ONLY)
        switches = {name: content.get(name) or False for name in SWITCHES}
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be true or false, not {value!r}")
        ids = content.get("eagle_aux_hidden_state_layer_ids") or default_layers(num_layers)
        verifier = (content.get("speculators_config") or {}).get("verifier") or {}
        return cls(
            layer,
            content.get("draft_vocab_size") or layer.vocab_size,
            content.get("target_hidden_size") or layer.hidden_size,
            tuple(ids),
            verifier.get("name_or_path"),
            **switches,
        )

    def check(self, target: Model) -> None:
        """Raises ValueError if the head was trained for another target.

        Targets are compared by the last part of their names: a folder may be a copy from the hub.
        """
        if self.verifier and Path(self.verifier).name.lower() not in names_of(target):
            raise ValueError(
                f"it was trained for {self.verifier}, and the target is {target.name} (if that is "
                f"a copy, name its folder {Path(self.verifier).name})"
            )
        check_sizes(self.target_hidden_size, self.layer.vocab_size, target)
        check_layers(self.layer_ids, 1, target)


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs are read where a head's config does not say."""
    return 2, num_layers // 2, num_layers - 3


def names_of(target: Model) -> set[str]:
    """Names of a target: the folders that it lies in, or the name of its file.

    Example: …/models--org--Name/snapshots/0e9e… is the hub's copy of org/Name, and
    Name.Q4_K_M.gguf a file of it.
    """
    path, known = Path(target.name).resolve(), str(target.model.config._name_or_path)
    parts = [part.split("--")[-1].lower() for part in (*path.parts, *Path(known).parts)]
    return {*parts, *(part.partition(".q")[0] for part in parts)}


class FirstLayer(nn.Module):
    """A decoder layer that reads [embedding, state] and adds its results to the state."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        layer = _LAYERS[config.layer.model_type](config.layer, 0)
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.hidden_norm = llama.LlamaRMSNorm(config.layer.hidden_size, config.layer.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            twice = nn.Linear(2 * old.in_features, old.out_features, old.bias is not None)
            setattr(self.self_attn, name, twice)
        self.norm_before_residual = config.norm_before_residual

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, cache: Any) -> Tensor:
        """x [B, T, 2 D] -> [B, T, D] under an additive mask [B, 1, T, keys]."""
        embeds, state = x.chunk(2, -1)
        normed = self.hidden_norm(state)
        read = torch.cat([self.input_layernorm(embeds), normed], -1)
        attended, _ = self.self_attn(
            hidden_states=read, position_embeddings=rope, attention_mask=mask, past_key_values=cache
        )
        x = attended + (normed if self.norm_before_residual else state)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Head(nn.Module):
    """The head. Its parts are named as in the speculators layout."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config, layer = config, config.layer
        sizes = [config.target_hidden_size] * len(config.layer_ids)
        wide = sum(sizes)

        def norm(width: int) -> llama.LlamaRMSNorm:
            return llama.LlamaRMSNorm(width, layer.rms_norm_eps)

        if config.norm_before_fc:
            self.input_norm = norm(wide)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(map(norm, sizes))
        self.fc = nn.Linear(wide, layer.hidden_size, bias=False)
        self.layers = nn.ModuleList([FirstLayer(config)])
        self.norm = norm(layer.hidden_size)
        self.lm_head = nn.Linear(layer.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.rotary_emb = llama.LlamaRotaryEmbedding(layer)
        self.embed_tokens: nn.Embedding | None = None  # the target's, unless the file has one

    @property
    def target_ids(self) -> Tensor:
        """[draft vocabulary]: the target's id of each draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def enter(self, states: Tensor) -> Tensor:
        """The target's states [..., 3 D], side by side -> the first h [..., D]."""
        if self.config.norm_before_fc:
            states = self.input_norm(states)
        if self.config.fc_norm:
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([n(part) for n, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(states)

    def forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor, cache: Any = None
    ) -> Tensor:
        """The next h [B, T, D] of pairs: an embedding and an h, both [B, T, D]."""
        x = torch.cat([embeds, hidden.to(embeds.dtype)], -1)
        x = self.layers[0](x, self.rotary_emb(x, positions), mask, cache)
        return self.norm(x) if self.config.norm_output else x

    def logits(self, hidden: Tensor) -> Tensor:
        """An h [..., D] -> [..., draft vocabulary]."""
        return self.lm_head(hidden if self.config.norm_output else self.norm(hidden))


class Eagle3Drafter(AutoregressiveDrafter):
    """Drafts with an EAGLE-3 head, batched over requests."""

    name: ClassVar[str] = "eagle3"
    rank = 1
    title, output = "EAGLE-3", "lm_head"

    @staticmethod
    def kernel_of(head: nn.Module, number: int, length: int) -> Any:
        return kernels.eagle_layer(head, number, length)

    @staticmethod
    def make_head(content: dict[str, Any], weights: dict[str, Tensor], target: Model) -> Eagle3Head:
        """The head for a target, from either layout; see HeadDrafter."""
        config = HeadConfig.of(content, target.model.config.get_text_config().num_hidden_layers)
        config.check(target)
        head, embed_tokens = Eagle3Head(config), target.model.get_input_embeddings()
        like = embed_tokens.weight
        # The names of the original layout become those of the speculators layout.
        weights = {
            key.removeprefix("model.").replace("midlayer.", "layers.0.", 1): weight
            for key, weight in weights.items()
        }
        for key in _UNUSED & weights.keys():
            del weights[key]
        embeddings = weights.pop("embed_tokens.weight", None)
        if embeddings is not None and not torch.equal(embeddings.to(like), like):  # often a copy
            embed_tokens = nn.Embedding.from_pretrained(embeddings)
        shape, expected = list(embed_tokens.weight.shape), [len(like), config.layer.hidden_size]
        if shape != expected:
            raise ValueError(f"its embeddings are {shape}, not {expected}")
        if config.draft_vocab_size == len(like):
            weights.setdefault("d2t", head.d2t)
        fill(head, weights)
        ids = head.target_ids
        if len(ids.unique()) != len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < len(like):
            raise ValueError("d2t does not lead to different tokens of the target")
        head.embed_tokens = embed_tokens
        return head

    def __init__(self, head: Eagle3Head, context: Context) -> None:
        # A layer's input is what comes out of the block before.
        self.hidden_layers = tuple(i - 1 for i in head.config.layer_ids)
        super().__init__(head, context, head.target_ids)

    def _run(self, embeds: Tensor, hidden: Tensor, place: Placement, layer: int) -> Tensor:
        """The pair j of a text stands at position j, and in the cache's slot j."""
        mask = place.mask(embeds.dtype)
        return self._head(embeds, hidden, place.positions, mask, self._caches[layer])

    def _enter(self, hidden: Tensor) -> Tensor:
        return self._head.enter(hidden)

    def _scores(self, outputs: Tensor) -> Tensor:
        return self._head.logits(outputs)
