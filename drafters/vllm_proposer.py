"""A drafter of this project inside vLLM, as its custom proposer: one that needs tokens only.

    SPECULATIVE_DRAFTER=/path/mine.py:Mine PYTHONPATH=/path/of/this/repository vllm serve MODEL \\
        --speculative-config '{"method": "custom_class",
            "model": "drafters.vllm_proposer.Proposer", "num_speculative_tokens": 5}'

vLLM makes the proposer once, and calls `propose` after each pass. It shows its batch's rows and
does not say whose they are: a row may be another request's than it was. So each row's text is
compared with what the row's drafter has read. What goes on becomes a verdict; any other text is
a new request's.

The pool stands between, as in the server: a drafter that fails, or proposes ids that do not exist,
costs its request the speculation and not the answer.

Not covered: what vLLM does not hand over, which is hidden states, sampling and a request's end.
"""

import os
from collections.abc import Sequence
from typing import Any

from messages import Request, Verdict

from . import Context, Noise, load
from .pool import DraftedText, DrafterPool, Task

VARIABLE = "SPECULATIVE_DRAFTER"  # has the drafter's name, as --drafter has it
TOKENS_ONLY = ("ngram", "suffix")  # built in; drafters from a file are asked


class Proposer:
    """What vLLM's speculative config names."""

    def __init__(self, vllm_config: Any) -> None:
        """Raises ValueError for a drafter that needs more than tokens."""
        name = os.environ.get(VARIABLE, "ngram")
        drafter = load(name, Context(None, None)) if ":" in name or name in TOKENS_ONLY else None
        if drafter is None or drafter.needs_hidden:
            raise ValueError(f"{VARIABLE}={name}: this drafter needs more than tokens")
        model = vllm_config.model_config
        self._name, self._length = drafter.name, model.max_model_len
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._pool = DrafterPool({drafter.name: drafter}, model.get_vocab_size())
        self._rows: dict[int, tuple[list[int], DraftedText]] = {}  # ids read, and the text

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is none, but vLLM calls this on a CPU."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Sequence[int],
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A draft for each row of the batch that got a token; token_ids_cpu is [rows, length]."""
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        rows = [row for row, sampled in enumerate(sampled_token_ids) if sampled]
        texts = [token_ids_cpu[row, : num_tokens_no_spec[row]].tolist() for row in rows]
        drafted = [self._drafted(row, text) for row, text in zip(rows, texts, strict=True)]
        limits = [max(0, min(self._most, self._length - 1 - len(text))) for text in texts]
        tasks = [
            Task(self._name, limit) if text.states else Task()
            for text, limit in zip(drafted, limits, strict=True)
        ]
        for row, draft in zip(rows, self._pool.propose(drafted, tasks), strict=True):
            drafts[row] = draft.tokens
        return drafts

    def _drafted(self, row: int, tokens: list[int]) -> DraftedText:
        """The row's text, which its drafter has read."""
        known, text = self._rows.get(row, ([], None))
        new = tokens[len(known) :]
        if text is None or tokens[: len(known)] != known:
            if text is not None:
                self._pool.close(text)
            text = DraftedText(Request(tokens, drafter=self._name), Noise(0))
            self._pool.open(text)
        elif new:
            num_drafted = len(text.draft.tokens) if text.draft else 0
            self._pool.observe(text, Verdict(num_drafted, len(new) - 1, new), {})
        self._rows[row] = tokens, text
        return text
