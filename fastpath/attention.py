"""Attention for queries that share keys and values, without a copy of them per query head.

transformers' sdpa repeats all keys and values for grouped queries as soon as there is a mask and
more than one query: at 4 096 tokens that is ten times the work itself. Here the queries of a group
become rows of one query matrix instead, G = H / Hkv of them per token:

    query [B, H, T, D] -> [B, Hkv, T · G, D]        mask [B, 1, T, L] -> [B, 1, T · G, L]

The number of rows is rounded up to a multiple of 8. A matrix kernel has ways of its own for 1, for
2 or 3 and for more rows, each with its own rounding; with eights a query gets the same bits whether
it is verified among six or decoded alone.

`register` makes it known to transformers under NAME; every model that attends through
transformers' interface can then use it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "grouped"
FULL = "full_attention"  # transformers' name for layers that see the whole text
_ROWS = 8  # query rows come in multiples of this


def windows_of(config: Any) -> dict[str, int | None]:
    """How far back each kind of a model's layers sees, None being all the way.

    A family with layers of one kind only may not name it; then it stands under FULL.
    """
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return {FULL: window}
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None = None
) -> Tensor:
    """Attention of query [B, T, H, D] to key and value [B, Hkv, L, D].

    `mask` is additive and grouped, [B, 1, rows, L]. Returns [B, T, H · D].
    """
    batch, num_queries, heads, width = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    rows = num_queries * groups
    grouped = query.reshape(batch, num_queries, kv_heads, groups, width).transpose(1, 2)
    grouped = grouped.reshape(batch, kv_heads, rows, width)
    if padding := -rows % _ROWS:
        grouped = nn.functional.pad(grouped, (0, 0, 0, padding))
    output = nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=mask, scale=scaling
    )
    output = output[:, :, :rows].reshape(batch, kv_heads, num_queries, groups, -1)
    return output.transpose(1, 2).reshape(batch, num_queries, -1)


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


class CausalMasks:
    """Grouped masks by position: a slice of a table for one row of the cache, else computed.

    The table's row j has 0 up to and including column `length` + j, and minus infinity behind. What
    a query at position p sees of keys 0 … L begins in column `length` - p, and the query after it
    has the next row.
    """

    def __init__(
        self,
        groups: int,
        length: int,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
        table_tokens: int = 32,
    ) -> None:
        self._groups, self._length, self._window, self._dtype = groups, length, window, dtype
        self._table_tokens = table_tokens if groups * length <= 1 << 17 else 0  # 32 MiB
        columns = torch.arange(2 * length, device=device)[None, None]
        queries = length + torch.arange(self._table_tokens + _ROWS, device=device)[None]
        self._table = self._compute(columns, queries)

    def _compute(self, keys: Tensor, queries: Tensor) -> Tensor:
        """[B, 1, rows, L] for keys [1, 1, L] and the positions of queries [B, T]."""
        rows = queries.repeat_interleave(self._groups, 1)
        rows = nn.functional.pad(rows, (0, -rows.shape[1] % _ROWS))[..., None]
        unseen = keys > rows
        if self._window is not None:
            unseen |= keys <= rows - self._window
        return additive(~unseen, self._dtype)[:, None]

    def of(self, positions: Tensor, start: int | None, kv_length: int) -> Tensor:
        """For queries at positions [B, T] on keys 0 … kv_length - 1.

        `start` is the first position where B is 1 and they are successive, else None.
        """
        count = positions.shape[1]
        if start is None or count > self._table_tokens or kv_length > self._length:
            return self._compute(
                torch.arange(kv_length, device=positions.device)[None, None], positions
            )
        rows, begin = count * self._groups, self._length - start
        rows += -rows % _ROWS
        return self._table[:, :, :rows, begin : begin + kv_length]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [B, H, T, D] each -> ([B, T, H, D], no weights).

    What `attend` is not made for (no mask, a mask per head, a position bias) goes to transformers'
    sdpa.
    """
    mask = attention_mask
    if mask is None or mask.shape[1] != 1 or options.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)
    if mask.dtype == torch.bool:
        mask = additive(mask, query.dtype)
    mask = grouped_mask(mask, query.shape[1] // key.shape[1])
    attended = attend(query.transpose(1, 2), key, value, mask, scaling)
    return attended.unflatten(-1, (query.shape[1], -1)), None


def register() -> None:
    """Let transformers know it, with sdpa's kind of masks."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
