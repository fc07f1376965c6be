"""A grammar drafts what it forces, and says what other drafters may draft.

What is forced costs nothing to propose, and is nearly always accepted:

    text so far   {"name":"Ada","age":36
    forced                                ,"tags":[

The text is forced, its tokens are not: the target may cut the same text into other tokens. So the
forced text is proposed as the tokenizer would write it, and judged as any draft is. Nothing is
drawn: q is one-hot.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from runtime.sampling import Noise
from runtime.values import Draft, Sampling, Verdict

from .base import DraftedText, GuessingDrafter

_MOST_FORCED = 16  # tokens


def forced_tokens(text: DraftedText, most: int) -> list[int]:
    """What a text's grammar forces next, where several drafters draft for it, and none draws."""
    if not text.matcher or len(text.states) < 2 or text.request.drafting.needs_q:
        return []
    if text.forced is None:
        text.forced = text.matcher.forced(_MOST_FORCED)
    return text.forced[:most]


def obeying(text: DraftedText, draft: Draft) -> Draft:
    """A draft in which stands first what is forced. (A tree has other branches beside that.)"""
    forced = forced_tokens(text, text.task.limit)
    is_obeying = draft.parents is not None or draft.tokens[: len(forced)] == forced
    return draft if is_obeying else Draft(forced)


def late_texts(texts: list[DraftedText]) -> list[DraftedText]:
    """Texts whose grammars have not said yet what may come; the others' drafts are cut to that."""
    constrained = [text for text in texts if text.matcher]
    for text in constrained:
        if text.draft is not None:
            text.matcher.explore(text.draft)
    began = time.monotonic()
    late = [text for text in constrained if not text.matcher.settle(began)]
    for text in constrained:
        if text.draft is not None and text not in late:
            is_drawn = text.draft.probs is not None and not text.request.sampling.is_coupled
            text.draft = text.matcher.cut(text.draft, is_drawn)
    return late


@dataclass(slots=True)
class GrammarState:
    """A request's place in its grammar."""

    matcher: Any = None


class GrammarDrafter(GuessingDrafter):
    """Proposes what must follow by the request's grammar."""

    name: ClassVar[str] = "grammar"
    needs = "grammar"

    def open(self, prompt: Sequence[int], sampling: Sampling, noise: Noise) -> GrammarState:
        return GrammarState()

    def attach(self, state: GrammarState, text: DraftedText) -> None:
        state.matcher = text.matcher

    def guess(self, state: GrammarState, max_tokens: int) -> list[int]:
        """What the grammar forces next."""
        return state.matcher.forced(max_tokens) if state.matcher else []

    def evidence(self, state: GrammarState) -> int:
        """How long the forced text is, in tokens: short ones are mostly cut into others."""
        return len(state.matcher.forced(8))

    def observe(self, state: GrammarState, verdict: Verdict) -> None:
        """The engine has told the matcher already."""
