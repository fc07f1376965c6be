"""What a KV cache must know of a model, measured by running it: windows, and layers that cache.

A config does not tell it. A Llama whose config has a `sliding_window` ignores it, and a layer may
keep two caches. So the model reads a few tokens while its mask makers are watched. A mask maker
takes a rule, (query position, key position) -> seen or not, and a rule can be asked about positions
far behind those few tokens.

The KV cache serves two rules: a token sees all tokens before it, or the last `window` of them.
Another rule, such as llama4's chunks, is served for the positions at which it agrees with these.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as _MAKERS

from runtime import kernels

FULL = "full_attention"  # transformers' name for layers that see the whole text
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, query, key -> seen

_NUM_READ = 4  # tokens
_NUM_QUERIES = 64  # positions that a rule is asked about, besides those at its borders
# Keys and values, or nothing; or states that runtime/cache/states.py keeps.
_CACHES = (DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
_STATES = LinearAttentionCacheLayerMixin


class UnsupportedModel(ValueError):
    """The KV cache cannot serve this model; a clause that says why."""


@dataclass(frozen=True)
class Structure:
    """The result of `examine`."""

    windows: dict[str, int | None]  # by kind of layer, how far back it sees; None: to the start
    num_cache_layers: int
    length: int  # how many positions the windows hold for
    has_experts: bool  # whether layers choose among experts
    is_recurrent: bool  # whether layers keep states


def examine(model: PreTrainedModel, length: int) -> Structure:
    """The structure of a model of transformers for texts of up to `length` tokens.

    Kinds of layers are those of the config's `layer_types`. FULL stands for all layers where there
    are none. Raises UnsupportedModel.
    """
    config = model.config.get_text_config()
    # ALiBi's position bias cannot be expressed as a 4-D mask.
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise UnsupportedModel("uses ALiBi, which is not supported")
    if getattr(config, "attention_type", None) == "block_sparse":
        raise UnsupportedModel("reads long texts in blocks, and short ones otherwise")
    if "position_ids" not in signature(model.forward).parameters:
        raise UnsupportedModel("counts positions itself, so texts cannot share its forwards")
    kinds = getattr(config, "layer_types", None) or []
    rules, num_cache_layers, is_recurrent = _read(model)
    if model._is_stateful and not is_recurrent:
        raise UnsupportedModel("keeps states outside its cache")
    windows: dict[str, int | None] = {}
    known = dict[Rule, tuple[int | None, int]]()  # most layers share one
    for layer, rule in sorted(rules.items()):
        if rule not in known:
            known[rule] = window_of(rule, length, model.device)
        window, length = known[rule][0], min(length, known[rule][1])
        kind = kinds[layer] if layer < len(kinds) else FULL
        if windows.setdefault(kind, window) != window:
            raise UnsupportedModel("has layers of one kind with different windows")
    if len(set(windows.values())) < 2:  # layers that make no mask follow the others
        windows = dict.fromkeys([FULL, *kinds], next(iter(windows.values()), None))
    windows = dict.fromkeys(kinds) | windows
    num_cache_layers = num_cache_layers or config.num_hidden_layers
    # A config may name experts that no layer has.
    has_experts = any("experts" in name.split(".") for name, _ in model.named_modules())
    return Structure(windows, num_cache_layers, length, has_experts, is_recurrent)


@kernels.exclusive()
@torch.inference_mode()
def _read(model: PreTrainedModel) -> tuple[dict[int, Rule], int, bool]:
    """Let the model read a few tokens.

    Returns each layer's rule, how many layers of a cache it uses, and whether some of these hold
    states. Layers that make masks themselves have no rule here. Raises UnsupportedModel.
    """
    ids = torch.ones(1, _NUM_READ, dtype=torch.long, device=model.device)
    made, rules = list[tuple[Tensor, Rule]](), dict[int, Rule]()  # by the layer's index

    def make(usual: Callable[..., Tensor], *args: Any, mask_function: Rule, **options: Any) -> Any:
        """A mask of one of transformers' mask makers; it is not left out, and it is noted."""
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        made.append((usual(*args, mask_function=mask_function, **options), mask_function))
        return made[-1][0]

    def note(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A forward hook. A block comes before its attention, so the attention's mask stays."""
        for argument in (*args, *options.values()):
            rules.update((module.layer_idx, rule) for mask, rule in made if mask is argument)

    with ExitStack() as stack:
        for name in ("sdpa", "eager"):
            _MAKERS[name] = partial(make, _MAKERS[name])
            stack.callback(_MAKERS.pop, name)  # transformers' makers are visible again
        for module in model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                stack.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
        try:
            output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True)
        except Exception as error:
            raise UnsupportedModel(f"cannot read a text: {error}") from error
    if (cache := getattr(output, "past_key_values", None)) is None:
        raise UnsupportedModel("has no KV cache in transformers")
    cache = getattr(cache, "self_attention_cache", cache)  # a decoder's, without its encoder
    layers = getattr(cache, "layers", [])
    recurrent = [layer for layer in layers if isinstance(layer, _STATES)]
    known = {*_CACHES, *map(type, recurrent)}
    others = {type(part).__name__ for part in (cache, *layers) if type(part) not in known}
    if others:
        raise UnsupportedModel(f"caches more than keys and values ({', '.join(sorted(others))})")
    if len(recurrent) == len(layers) and not any(isinstance(x, DynamicLayer) for x in layers):
        raise UnsupportedModel("has recurrent layers only, not supported yet")
    if any(layer.number_of_states > 1 for layer in recurrent):
        raise UnsupportedModel("keeps several states in one layer")
    return rules, len(layers), bool(recurrent)


def window_of(rule: Rule, length: int, device: Any = "cpu") -> tuple[int | None, int]:
    """A rule's window, and for how many positions (at most `length`) the rule is just that.

    Example: chunks of 8 192 tokens -> (None, 8 192): up to there a token sees all before it.
    """
    every = torch.arange(length, device=device)
    hidden = (~_seen(rule, every, every[:1])).flatten().nonzero()
    border = int(hidden[0]) if len(hidden) else length  # from here on the first token is not seen
    if not border or not _is_causal(rule, every[:border], border):
        raise UnsupportedModel("does not read a text from left to right")
    if border == length:
        return None, length
    return (border, length) if _is_causal(rule, every, border) else (None, border)


def _is_causal(rule: Rule, keys: Tensor, window: int) -> bool:
    """Whether the rule, for keys 0, 1, …, is to see the last `window` tokens."""
    length = len(keys)
    at = {*torch.linspace(0, length - 1, _NUM_QUERIES).int().tolist(), 1, length - 2}
    at |= {times * window + i for times in (1, 2, 3) for i in (-1, 0, 1)}
    queries = keys[sorted(q for q in at if 0 <= q < length)]
    expected = (keys <= queries[:, None]) & (keys > queries[:, None] - window)
    return torch.equal(_seen(rule, queries, keys), expected)


def _seen(rule: Rule, queries: Tensor, keys: Tensor) -> Tensor:
    """[Q, K] bool: which keys each query sees."""
    zero = queries.new_zeros(1, 1, 1, 1)
    seen = rule(zero, zero, queries[None, None, :, None], keys[None, None, None, :])
    return seen.expand(1, 1, len(queries), len(keys))[0, 0]
