"""A small model of the target's family drafts token by token (Leviathan et al., arXiv 2211.17192).

It has a KV cache of its own, of the core's kind, so truncation is written once. One rule keeps it
in step with the target: after a verdict, truncate to what is both cached and committed; before the
next draft, feed every committed token that is not cached. Full acceptance (whose last draft token
was never fed), a cycle without a draft, and the first call (the whole prompt) are all that one
rule.

Not covered: a draft model with another tokenizer; it is refused at start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Generator

from .base import Context, Draft, Drafter, Sampling, Verdict


@dataclass(slots=True)
class _State:
    row: int  # in the draft model's KV cache
    tokens: list[int]  # committed so far


class SmallModelDrafter(Drafter):
    """Runs `--draft-model`, one batched forward per draft step for all requests that use it."""

    name: ClassVar[str] = "draft_model"

    def __init__(self, draft: Any, vocab_size: int) -> None:
        self._draft = draft
        # Ids that the target knows too: a padded embedding may have more rows.
        self._vocab_size = vocab_size

    @classmethod
    def build(cls, context: Context) -> "SmallModelDrafter":
        """Raises ValueError without a draft model, or with one of another vocabulary or context."""
        target, draft = context.target, context.draft
        if draft is None:
            raise ValueError(
                "the drafter draft_model needs a model: give --draft-model DIR_OR_HUB_ID"
            )
        if draft.tokenizer.get_vocab() != target.tokenizer.get_vocab():
            raise ValueError(
                f"draft model {draft.name} and target {target.name} have different tokenizers: "
                "give a --draft-model of the same family, or use --drafter ngram"
            )
        if draft.max_length < target.max_length:
            raise ValueError(
                f"draft model {draft.name} holds {draft.max_length} tokens and the target "
                f"{target.max_length}: give --max-model-len {draft.max_length} or less"
            )
        return cls(draft, min(draft.vocab_size, target.vocab_size))

    def open(self, prompt: Sequence[int], sampling: Sampling, rng: Generator | None) -> _State:
        return _State(self._draft.cache.open_row(), list(prompt))

    def propose(self, state: _State, max_tokens: int) -> Draft:
        return self.propose_batch([state], [max_tokens])[0]

    def propose_batch(self, states: list[_State], max_tokens: list[int]) -> list[Draft]:
        """One batched forward per draft step; the first also feeds what is not cached yet."""
        cache = self._draft.cache
        drafts: list[list[int]] = [[] for _ in states]
        fed = [state.tokens[cache.lengths[state.row] :] for state in states]
        for step in range(max(max_tokens)):
            active = [i for i, limit in enumerate(max_tokens) if limit > step]
            output = self._draft.forward(
                [states[i].row for i in active],
                [fed[i] for i in active],
                num_logits=[1] * len(active),
            )
            for i, logits in zip(active, output.logits, strict=True):
                token = int(logits[0, : self._vocab_size].argmax())
                drafts[i].append(token)
                fed[i] = [token]
        return [Draft(tokens) for tokens in drafts]

    def observe(self, state: _State, verdict: Verdict) -> None:
        cache = self._draft.cache
        # Before the append, len(state.tokens) of the cached tokens are committed text; of the draft
        # behind them, `accepted` tokens are.
        committed = len(state.tokens) + verdict.accepted
        cache.truncate(state.row, min(cache.lengths[state.row], committed))
        state.tokens.extend(verdict.tokens)

    def close(self, state: _State) -> None:
        self._draft.cache.close_row(state.row)
