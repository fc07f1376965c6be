"""Attention for queries that share keys and values, without a copy of them per query head.

transformers' sdpa repeats all keys and values for grouped queries as soon as there is a mask and
more than one query: at 4 096 tokens that is ten times the work itself. Here the queries of a group
become rows of one query matrix instead, G = H / Hkv of them per token:

    query [B, H, T, D] -> [B, Hkv, T · G, D]        mask [B, 1, T, L] -> [B, 1, T · G, L]

The number of rows is rounded up to a multiple of 8. A matrix kernel has ways of its own for 1, for
2 or 3 and for more rows, each with its own rounding; with eights a query gets the same bits whether
it is verified among six or decoded alone.

torch gives each head of each sequence to one thread. A single one (one sequence, one head of keys)
it computes in the calling thread, and there the matrix kernel may split a query's sums among all
threads. So a single one is computed twice over, by two threads, and one result is dropped.

Sequences of unequal counts come one behind the other, as `Ragged` tells, and are computed without
pads but here, where the queries of one sequence have to stand together.

`register` makes it known to transformers under NAME; every model that attends through
transformers' interface can then use it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "grouped"
FULL = "full_attention"  # transformers' name for layers that see the whole text
KEY_BLOCK = 512  # torch's attention takes keys in blocks of so many
_ROWS = 8  # query rows come in multiples of this
_ONE_TASK = 32  # query rows that torch gives to one thread


class Ragged(NamedTuple):
    """Where N rows, the tokens of B sequences one behind the other, lie in [B, T].

    T is the largest count; shorter sequences are padded on the left. Rows to spare come last.
    """

    padded: Tensor  # [B, T]: the row of each place's token; any row for a pad
    real: Tensor  # [N]: the place, below B · T, of each row's token; any place for a row to spare
    queries: Tensor  # [B, T]: the position of each place's token


class Call(NamedTuple):
    """A kind of attention: what decides which kernel runs, but for the numbers of tokens."""

    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    scaling: float | None
    softcap: float | None
    has_sinks: bool

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> "Call":
        """From what `attend` is given."""
        scaling, softcap, sinks = rest
        widths = key.shape[-1], value.shape[-1]
        return cls(query.shape[-2], key.shape[1], *widths, scaling, softcap, sinks is not None)


_recorded: set[Call] | None = None


@contextmanager
def recording() -> Iterator[set[Call]]:
    """Collects every kind of attention that runs meanwhile."""
    global _recorded
    _recorded = set()
    try:
        yield _recorded
    finally:
        _recorded = None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None = None,
    ragged: Ragged | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of query [B, T, H, D], or ragged [N, H, D], to key and value [B, Hkv, L, D].

    `mask` is additive and grouped, [B, 1, rows, L]. Returns [B, T, H · D], or [N, H · D].
    """
    if _recorded is not None:
        _recorded.add(Call.of(query, key, value, scaling, softcap, sinks))
    if ragged is not None:
        query = query[ragged.padded]
    batch, num_queries, heads, width = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    rows = num_queries * groups
    grouped = query.reshape(batch, num_queries, kv_heads, groups, width).transpose(1, 2)
    grouped = grouped.reshape(batch, kv_heads, rows, width)
    if padding := -rows % _ROWS:
        grouped = nn.functional.pad(grouped, (0, 0, 0, padding))
    if batch * kv_heads == 1 and grouped.shape[2] <= _ONE_TASK:
        grouped, key, value = (x.expand(2, -1, -1, -1) for x in (grouped, key, value))
    if softcap is None and sinks is None:
        output = nn.functional.scaled_dot_product_attention(
            grouped, key, value, attn_mask=mask, scale=scaling
        )
    else:
        scaling = width**-0.5 if scaling is None else scaling
        output = _attend_step_by_step(grouped, key, value, mask, scaling, softcap, sinks)
    output = output[:batch, :, :rows].reshape(batch, kv_heads, num_queries, groups, -1)
    output = output.transpose(1, 2).reshape(batch, num_queries, -1)
    return output if ragged is None else output.flatten(0, 1)[ragged.real]


def _attend_step_by_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """What torch's fused operator does not know: soft caps (Gemma 2) and sinks (gpt-oss).

    query [B, Hkv, rows, D] has its rows by token and then by head of the group; sinks [H] take a
    share of each head's softmax and give nothing.
    """
    keys, values = key.split(KEY_BLOCK, 2), value.split(KEY_BLOCK, 2)
    scores = torch.cat([query @ block.transpose(2, 3) for block in keys], -1) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is not None:
        by_group = sinks.view(key.shape[1], -1)  # [Hkv, G]
        tokens = -(-scores.shape[2] // by_group.shape[1])
        column = by_group.repeat(1, tokens)[:, : scores.shape[2], None].to(scores.dtype)
        scores = torch.cat([scores, column.expand(len(scores), -1, -1, -1)], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
    # Block by block, so that more keys are more products and not another kind of product.
    parts = zip(weights.split(KEY_BLOCK, -1), values, strict=True)
    return sum((part @ block).float() for part, block in parts).to(query.dtype)


def grouped_mask(mask: Tensor, groups: int) -> Tensor:
    """An additive mask [B, 1, T, L] -> [B, 1, rows, L]; made once for all layers of a forward."""
    if getattr(mask, "groups", None) != groups:
        mask.groups = groups
        padding = -(mask.shape[2] * groups) % _ROWS
        mask.rows = nn.functional.pad(mask.repeat_interleave(groups, 2), (0, 0, 0, padding))
    return mask.rows


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of booleans (True = seen) as one to be added to the scores."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


def causal_mask(num_queries: int, length: int, like: Tensor) -> Tensor:
    """Additive [1, 1, T, L] for the last T of L positions."""
    mask = like.new_full((num_queries, length), torch.finfo(like.dtype).min)
    return mask.triu_(length - num_queries + 1)[None, None]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [B, H, T, D] each -> ([B, T, H, D], no weights).

    A mask that has `ragged` says that the queries [1, H, N, D] are those of several sequences.
    What `attend` is not made for (no mask, a mask per head, a position bias) goes to transformers'
    sdpa.
    """
    mask = attention_mask
    if mask is None and (softcap is not None or s_aux is not None):  # left out as it is causal
        mask = causal_mask(query.shape[2], key.shape[2], query)
    if mask is None or mask.shape[1] != 1 or options.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)
    ragged = getattr(mask, "ragged", None)
    if mask.dtype == torch.bool:
        mask = additive(mask, query.dtype)
    mask = grouped_mask(mask, query.shape[1] // key.shape[1])
    rows = query.transpose(1, 2)
    rows = rows if ragged is None else rows[0]
    attended = attend(rows, key, value, mask, scaling, ragged, softcap, s_aux)
    attended = attended if ragged is None else attended[None]
    return attended.unflatten(-1, (query.shape[1], -1)), None


def register() -> None:
    """Let transformers know it, with sdpa's kind of masks."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
