"""The drafters that are trained: EAGLE-3, DFlash, a target's MTP layer and a small model.

Each begins as a part of its target, which saves the first epochs, and is saved in the layout that
drafters/ read, which is a public one.
"""

import json
from collections.abc import Iterable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers import Qwen3ForCausalLM as SmallModel
from transformers.modeling_layers import MtpModel

from drafters.dflash import BlockConfig, DFlashHead
from drafters.eagle3 import SWITCHES, Eagle3Head, HeadConfig, default_layers
from drafters.mtp import MIMO, host_of, run_layer
from runtime.kernels import norm_of, parts_of
from runtime.models.files import is_gguf
from runtime.models.mimo import MiMoConfig
from runtime.models.weights import FILE, fill, read_folder

from .recipe import TRAIN, Batch, Data, Student, additive, every_state, pick, unroll

SHARED = (  # what a head's config takes from its target's
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps",
    "num_key_value_heads", "hidden_act", "max_position_embeddings",
)  # fmt: skip
IDS = "bos_token_id", "eos_token_id", "pad_token_id"
OF_MODELS = (  # what a model's takes beside that
    "num_hidden_layers", "rope_parameters", "tie_word_embeddings", "head_dim", *IDS,
)  # fmt: skip
OF_DRAFTS = (  # what a draft model's takes
    "vocab_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings", *IDS,
)  # fmt: skip


def _begun(data: Data, plan: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The ids of a head's words; and the weights of a trained head, where it begins as one."""
    if not plan.begin:
        return data.commonest(plan.draft_words), {}
    try:
        _, weights = read_folder(str(plan.begin), allow_pickle=False)
        return weights.pop("t2d").nonzero()[:, 0], weights
    except (OSError, ValueError, SafetensorError, KeyError) as error:
        raise SystemExit(f"error: no head of this recipe is in {plan.begin}: {error}") from error


def _begin_as(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Fill it with a trained head's weights."""
    try:
        fill(module, weights)
    except ValueError as error:
        raise SystemExit(f"error: the head of --begin is another target's: {error}") from error


def _layer_config(target: PreTrainedModel, kind: str, num_layers: int) -> Any:
    """The config of a head's layers, of the sizes of the target's."""
    config, rope = target.config, target.config.rope_parameters
    layer = AutoConfig.for_model(
        kind,
        num_hidden_layers=num_layers,
        rope_parameters=rope.get("full_attention", rope),
        head_dim=target.get_decoder().layers[-1].self_attn.head_dim,
        attention_bias=getattr(config, "attention_bias", False),
        **{name: getattr(config, name) for name in SHARED},
    )
    layer._attn_implementation = TRAIN
    return layer


def _wide(weight: Tensor, inputs: int, std: float) -> Tensor:
    """[out, D] -> [out, inputs]: the weight reads the last inputs, the others next to nothing."""
    wide = nn.init.normal_(torch.empty(len(weight), inputs), std=std)
    wide[:, -weight.shape[1] :] = weight
    return wide


class Eagle3(Student):
    """One layer that reads states of three layers (drafters/eagle3.py)."""

    def __init__(self, target: PreTrainedModel, data: Data, plan: Any) -> None:
        """fc hands on the last of the states, the layer and the output rows are the target's."""
        decoder, width = target.get_decoder(), target.config.hidden_size
        last, weights = decoder.layers[-1], decoder.layers[-1].state_dict()
        kind = "qwen3" if hasattr(last.self_attn, "q_norm") else "llama"
        self.target, self.verifier = target, plan.verifier
        self.words, begun = _begun(data, plan)
        layer = _layer_config(target, kind, 1)
        layers = self.layers_of(target.config.num_hidden_layers)
        config = HeadConfig(layer, len(self.words), width, layers, None)
        self.module = head = Eagle3Head(config)
        self.logits = head.logits
        for name in ("q", "k", "v"):
            key = f"self_attn.{name}_proj.weight"
            weights[key] = _wide(weights[key], 2 * width, 0.01)
        weights["hidden_norm.weight"] = weights["input_layernorm.weight"]
        weights["input_layernorm.weight"] = torch.ones(width)
        head.layers[0].load_state_dict(weights)
        with torch.no_grad():
            head.fc.weight.copy_(_wide(torch.eye(width), head.fc.in_features, 0.002))
            head.norm.load_state_dict(decoder.norm.state_dict())
            head.lm_head.weight.copy_(target.get_output_embeddings().weight[self.words])
            head.d2t.copy_(self.words - torch.arange(len(self.words)))
        if begun:
            _begin_as(head, begun)
        head.embed_tokens = target.get_input_embeddings()

    @staticmethod
    def layers_of(num_layers: int) -> tuple[int, ...]:
        """The layers of the target that a head reads if its config names none."""
        if num_layers < 4:
            raise SystemExit(f"error: a head reads three layers, and the target has {num_layers}")
        return default_layers(num_layers)

    def steps(self, batch: Batch, places: Tensor) -> Iterator[Tensor]:
        """The layer's outputs, step by step, each from those before; see Student."""
        head = self.module
        return unroll(self, head, head.enter(batch.states), batch, places)

    def save(self, folder: Path) -> None:
        names = {"name_or_path": self.verifier, "architectures": [type(self.target).__name__]}
        save_eagle3(self.module, folder, names, self.num_steps)


class DFlash(Student):
    """Layers that fill a whole block at once (drafters/dflash.py).

    A block [anchor, mask, mask, …] stands at each place: its anchor is the pending token. Its
    layers see the target's states of all places before the anchor, and the block. Those who draft
    do not know the first drafted token when they draft the second, so what can be learnt is its
    distribution whatever stands between.
    """

    SIZE, NUM_LAYERS = 8, 2
    num_steps = SIZE - 1
    weights = tuple(0.78**step for step in range(num_steps))

    def __init__(self, target: PreTrainedModel, data: Data, plan: Any) -> None:
        """The layers begin as the target's last ones, which are of Qwen3's kind (train.FITS)."""
        own, decoder = target.config, target.get_decoder()
        self.target, self.words = target, torch.arange(own.vocab_size)
        ids = tuple(i - 1 for i in self.layers_of(own.num_hidden_layers))
        mask = own.eos_token_id
        mask = mask[0] if isinstance(mask, list) else mask  # the end of a text is nobody's anchor
        layer = _layer_config(target, "qwen3", self.NUM_LAYERS)
        config = BlockConfig(layer, self.SIZE, mask, ids, own.num_hidden_layers)
        self.module = head = DFlashHead(config)
        self.logits = nn.Sequential(head.norm, target.get_output_embeddings())
        with torch.no_grad():
            nn.init.normal_(head.fc.weight, std=0.01)
            head.fc.weight.unflatten(1, (len(ids), -1))[:, 1] += torch.eye(own.hidden_size)
            for new, old in zip(head.layers, decoder.layers[-self.NUM_LAYERS :], strict=True):
                new.load_state_dict(old.state_dict())
            head.hidden_norm.load_state_dict(decoder.layers[-2].input_layernorm.state_dict())
            head.norm.load_state_dict(decoder.norm.state_dict())

    @staticmethod
    def layers_of(num_layers: int) -> tuple[int, ...]:
        """An early one and the last ones."""
        return 3, num_layers - 2, num_layers

    def steps(self, batch: Batch, places: Tensor) -> Iterator[Tensor]:
        """The head's outputs for each token of a draft, all of one forward; see Student."""
        head, (num, count), size = self.module, places.shape, self.SIZE
        ids = torch.full((num, count, size), head.config.mask_token_id)
        ids[:, :, 0] = batch.tokens.gather(1, (places + 1).clamp(max=batch.tokens.shape[1] - 1))
        x = self.target.get_input_embeddings()(ids).flatten(1, 2)  # the blocks in a row
        at = (places[..., None] + 1 + torch.arange(size)).flatten(1)
        block = torch.arange(count).repeat_interleave(size)
        before = batch.every[:, None] <= places.repeat_interleave(size, 1)[..., None]
        own = (block[:, None] == block).expand(num, -1, -1)
        masks = {"full_attention": additive(torch.cat([before, own], -1))}
        at = torch.cat([batch.every, at], 1)
        x = head.run(x, head.enter(batch.states), at, masks, [None] * self.NUM_LAYERS)
        yield from x.unflatten(1, (count, size)).unbind(2)[1:]

    def save(self, folder: Path) -> None:
        save_dflash(self.module, folder)


# Parts of transformers' MtpLayer and their names in the files: of most families, and of MiMo.
_OWN = {
    "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc", "post_norm": "mtp.norm", "mtp_block": "mtp.layers.0",
}  # fmt: skip
_MIMO = {"mtp_block": "model.mtp_layers.0"}
_MIMO |= {ours: f"model.mtp_layers.0.{theirs}" for ours, theirs in MIMO.items()}
_HAVE_ONE = {"mellum", "qwen3_5_text", "mimo"}  # families with an MTP layer


def _mtp_config(target: PreTrainedConfig) -> PreTrainedConfig:
    """A target's config with an MTP layer; Llama's and Qwen2's as MiMo's, whose layers they are."""
    if target.model_type in _HAVE_ONE:
        config = deepcopy(target)
    else:
        fields = target.to_dict()
        config = MiMoConfig(**{n: fields[n] for n in (*SHARED, *OF_MODELS) if n in fields})
    for name, value in {"layer_types": "full_attention", "mlp_layer_types": "dense"}.items():
        if getattr(config, name, None):
            setattr(config, f"mtp_{name}", [value])
    is_mimo = config.model_type == "mimo"
    config.num_mtp_layers = config.num_nextn_predict_layers = 1
    config.mtp_hidden_states_first = is_mimo
    return config


class Mtp(Student):
    """The target's MTP layer: it reads the last state and the pending token.

    It is saved as a checkpoint of the target's family without the target's own weights, which
    `--mtp` takes. Llama and Qwen2, whose families have no such layer, take MiMo's layout.
    """

    num_steps, weights = 4, (1.0, 0.8, 0.6, 0.5)

    def __init__(self, target: PreTrainedModel, data: Data, plan: Any) -> None:
        """The layer begins as the target's last one, and reads the state alone."""
        self.words, begun = _begun(data, plan)
        self.config = _mtp_config(target.config)
        is_mimo = self.config.model_type == "mimo"
        self.names = _MIMO if is_mimo else _OWN
        self.module = MtpModel(host_of(self.config, target), 1)
        self.module.set_attn_implementation(TRAIN)
        self.module.requires_grad_(False).layers.requires_grad_(True)
        layer, decoder = self.module.layers[0], target.get_decoder()
        width = target.config.hidden_size
        self.logits = nn.Linear(width, len(self.words), bias=False)
        halves = torch.zeros(width, width), torch.eye(width)
        with torch.no_grad():
            rows = target.get_output_embeddings().weight[self.words]
            self.logits.requires_grad_(False).weight.copy_(rows)
            weights = decoder.layers[-1].state_dict()
            missing, unread = layer.mtp_block.load_state_dict(weights, strict=False)
            for name in missing:  # a Llama has no biases for queries, keys and values
                layer.mtp_block.get_parameter(name).zero_()
            if unread or not all(name.endswith("_proj.bias") for name in missing):
                kind = target.config.model_type
                raise SystemExit(f"error: {kind} is no MiMo: {[*unread, *missing][0]}")
            layer.post_norm.load_state_dict(decoder.norm.state_dict())
            layer.eh_proj.weight.copy_(torch.cat(halves[::-1] if is_mimo else halves, 1))
        if begun:
            names = {self._key(name): name for name in layer.state_dict()}
            _begin_as(layer, {names.get(key, key): weight for key, weight in begun.items()})

    def steps(self, batch: Batch, places: Tensor) -> Iterator[Tensor]:
        """The layer's outputs, step by step, each from those before; see Student."""

        def run(embeds: Tensor, hidden: Tensor, positions: Tensor, *rest: Any) -> Tensor:
            return run_layer(self.module, 0, embeds, hidden, positions + 1, *rest)

        return unroll(self, run, batch.final, batch, places)

    def _key(self, name: str) -> str:
        """What a weight of the layer is called in the file."""
        part, _, rest = name.partition(".")
        return f"{self.names[part]}.{rest}"

    def save(self, folder: Path) -> None:
        own = {"t2d": torch.isin(torch.arange(self.config.vocab_size), self.words)}
        for name, weight in self.module.layers[0].state_dict().items():
            own[self._key(name)] = weight
        self.config.dtype = "bfloat16"
        _write(folder, self.config.to_diff_dict(), own)


class Draft(Student):
    """A small model with the target's tokenizer, in Qwen3's form, cut out of the target.

    It begins as a few of the target's layers, seen in the directions in which the target's states
    differ most (arXiv 2401.15024): the embedding of a large vocabulary is most of a small model, so
    a word has few numbers. Of a target in a GGUF file the draft is one, too, with its tokenizer.
    """

    EMBEDDING = 13_000_000  # weights, at most
    WIDTH = 256
    BEGUN_BY = 64  # texts that say what matters in the target
    QUIET = 0.1  # factor of the first logits: layers that were cut short are too sure
    OTHERS = 2_048  # words in a step, beside the common ones; 0: `words` are all
    weights, share_of_places = (1.0,), 1.0  # a text's places are each other's later steps
    muon = 0.02

    def __init__(self, target: PreTrainedModel, data: Data, plan: Any) -> None:
        own, self.origin = target.config, plan.target
        layers, rope = target.get_decoder().layers, own.rope_parameters
        width = max(32, own.hidden_size * 2 // 3 // 32 * 32)
        width = min(self.WIDTH, width, self.EMBEDDING // own.vocab_size // 32 * 32)
        config = Qwen3Config(
            hidden_size=width, tie_word_embeddings=True, dtype="float32",
            # Five bits are stored in blocks of 32.
            intermediate_size=min(own.intermediate_size, width * 7 // 2) // 32 * 32,
            num_hidden_layers=max(2, len(layers) // 6),
            head_dim=getattr(getattr(layers[-1], "self_attn", None), "head_dim", 64),
            rope_parameters=rope.get("full_attention", rope),
            **{name: getattr(own, name) for name in OF_DRAFTS},
        )  # fmt: skip
        self.module = SmallModel(config)
        self.module.set_attn_implementation(TRAIN)
        self.module.generation_config.eos_token_id = target.generation_config.eos_token_id
        self.embedding = self.module.get_input_embeddings()
        self.words = self.common = data.commonest(plan.draft_words)
        self._cut_out(target, data.batch(data.train[:: len(data.train) // self.BEGUN_BY + 1]))

    @torch.no_grad()
    def _cut_out(self, target: PreTrainedModel, batch: Batch) -> None:
        """Begin as the target's first layers, whose states of some texts say what matters."""
        layers, norm = self.module.model.layers, self.module.model.norm
        decoder, embedding = target.get_decoder(), target.get_input_embeddings().weight.float()
        every = every_state(target, batch.tokens)
        real = batch.every < batch.lengths[:, None]
        seen = [embedding[self.common], *(every[i][real].float() for i in range(len(layers)))]
        normed = [F.rms_norm(x, x.shape[-1:], eps=1e-6) for x in seen]
        squares = [x.T @ x / len(x) for x in normed]
        basis = torch.linalg.eigh(sum(squares)).eigenvectors[:, -self.embedding.embedding_dim :]
        # A norm over fewer numbers makes each of them smaller.
        factor = (len(basis) / basis.shape[1]) ** 0.5
        self.embedding.weight.copy_(embedding @ basis)
        last = norm_of(getattr(decoder, "norm", None))
        norm.weight.mul_(self.QUIET * factor)
        if last is not None:
            norm.weight.mul_(last.weight.float() @ basis.square())
        for old, new, square in zip(decoder.layers, layers, squares[1:], strict=False):
            _cut_layer(old, new, basis, square)
            for own in (new.input_layernorm, new.post_attention_layernorm):
                own.weight.fill_(factor)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding.weight[self.words])

    def steps(self, batch: Batch, places: Tensor) -> Iterator[Tensor]:
        if self.OTHERS:  # rare words have their turns, or they would never learn to be silent
            others = torch.randint(self.embedding.num_embeddings, (self.OTHERS,))
            self.words = torch.cat([self.common, others]).unique()
        hidden = self.module.model(batch.tokens, use_cache=False)[0]
        last = batch.tokens.shape[1] - 1
        for step in range(self.num_steps):
            yield pick(hidden, (places + 1 + step).clamp(max=last))

    def save(self, folder: Path) -> None:
        save = save_gguf if is_gguf(self.origin) else save_model
        save(self.module, folder, self.origin)


def _cut_layer(old: nn.Module, new: nn.Module, basis: Tensor, square: Tensor) -> None:
    """A layer's weights seen in `basis` [D, d], with the neurons that matter most.

    `square` [D, D] is the mean of what it reads times itself. A layer of another kind begins as
    noise.
    """
    parts = parts_of(old)
    if parts is None or len(parts.qkv) != 3 or len(parts.up) != 2 or parts.norms[2] is None:
        return
    norms = [norm_of(norm).weight.float() for norm in (parts.norms[0], parts.norms[2])]
    query, key, value = (layer.weight.float() * norms[0] for layer in parts.qkv)
    gate, up = (layer.weight.float() * norms[1] for layer in parts.up)
    down = parts.down.weight.float()

    def mean_squares(rows: Tensor) -> Tensor:
        """[n, D] -> [n]: of what these rows of a weight give."""
        return ((rows @ square) * rows).sum(1)

    matters = down.square().sum(0) * mean_squares(gate) * mean_squares(up)
    kept = matters.topk(new.mlp.up_proj.out_features).indices
    attention, mlp = new.self_attn, new.mlp
    for layer, weight in (
        (attention.q_proj, query @ basis), (attention.k_proj, key @ basis),
        (attention.v_proj, value @ basis), (attention.o_proj, basis.T @ parts.out.weight.float()),
        (mlp.gate_proj, gate[kept] @ basis), (mlp.up_proj, up[kept] @ basis),
        (mlp.down_proj, basis.T @ down[:, kept]),
    ):  # fmt: skip
        layer.weight.copy_(weight)
    for i, (norm, rows) in enumerate(((attention.q_norm, query), (attention.k_norm, key))):
        if parts.qk_norms:
            norm.load_state_dict(parts.qk_norms[i].state_dict())
        else:  # the size that queries and keys have in the target
            norm.weight.fill_(float(mean_squares(rows).mean().sqrt()))


def save_eagle3(head: Eagle3Head, folder: Path, verifier: dict[str, Any], num_tokens: int) -> None:
    """Write the head in the speculators layout, without the target's embeddings.

    `verifier` names the target as the layout does; `num_tokens` is the K that it was trained for.
    """
    config = head.config
    method = {"proposal_type": "greedy", "speculative_tokens": num_tokens}
    content = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": config.layer_ids,
        **{name: getattr(config, name) for name in SWITCHES},
        "transformer_layer_config": config.layer.to_diff_dict(),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier,
        },
    }
    every = head.state_dict().items()
    weights = {name: weight for name, weight in every if not name.startswith("embed_tokens.")}
    weights["t2d"] = torch.isin(torch.arange(config.layer.vocab_size), head.target_ids)
    _write(folder, content, weights)


def save_dflash(head: DFlashHead, folder: Path) -> None:
    """Write a head in z-lab's layout."""
    config = head.config
    own = {"mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layer_ids}
    content = config.layer.to_diff_dict() | {
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "dflash_config": own,
        "num_target_layers": config.num_target_layers,
    }
    _write(folder, content, head.state_dict())


def _write(folder: Path, content: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Write a head's config, and its weights in bfloat16; numbers of words stay integers."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        name: (weight.bfloat16() if weight.is_floating_point() else weight).contiguous()
        for name, weight in weights.items()
    }
    save_file(stored, folder / FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def save_model(model: PreTrainedModel, folder: Path, tokenizer: str) -> None:
    """A Hugging Face folder in bfloat16, with the tokenizer of the folder of that name."""
    model.set_attn_implementation("sdpa")
    model.config.architectures = [type(model).__name__]
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


def save_gguf(model: SmallModel, file: Path, like: str) -> None:
    """A GGUF file with the tokenizer of another: 5 bits for the embedding, 6 for the layers."""
    file.parent.mkdir(parents=True, exist_ok=True)
    config, names = model.config, gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 99)
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    fields = gguf.GGUFReader(like).fields
    kept = [name for name in fields if name.startswith(("tokenizer.", "general.license"))]
    tensors = (
        (
            names.get_name(name, try_suffixes=(".weight",)),
            weight.detach().float().cpu().numpy(),
            "F32" if weight.dim() < 2 else "Q4_1" if "embed" in name else "Q5_1",
        )
        for name, weight in model.get_decoder().named_parameters(prefix="model")
    )
    write_gguf(writer, [fields[name] for name in kept], tensors)


def write_gguf(
    writer: gguf.GGUFWriter, fields: Iterable[gguf.ReaderField],
    tensors: Iterable[tuple[str, np.ndarray, str]],
) -> None:  # fmt: skip
    """End a file with fields of another and with weights, each in the type that is named."""
    for field in fields:
        kinds = {"sub_type": field.types[-1]} if len(field.types) > 1 else {}
        writer.add_key_value(field.name, field.contents(), field.types[0], **kinds)
    for name, weight, kind in tensors:
        stored = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(weight, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
