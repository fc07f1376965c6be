"""The grammar drafts: what it forces costs nothing to propose, and is nearly always accepted.

    text so far   {"name":"Ada","age":36
    forced                                ,"tags":[

The forced text is proposed as the tokenizer would write it, and judged as any draft is. Mostly its
tokens are forced, too; the last one may still grow by what follows. Nothing is drawn: q is one-hot.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import ClassVar

from runtime.sampling import Noise
from runtime.values import Sampling, Verdict

from .base import GuessingDrafter
from .plan import GRAMMAR, DraftedText


class GrammarDrafter(GuessingDrafter):
    """Proposes what must follow by the request's grammar."""

    name: ClassVar[str] = GRAMMAR
    needs = "grammar"
    drafts_forced = True

    def open(self, prompt: Sequence[int], sampling: Sampling, noise: Noise) -> SimpleNamespace:
        return SimpleNamespace(matcher=None)  # where the text stands in its grammar

    def attach(self, state: SimpleNamespace, text: DraftedText) -> None:
        state.matcher = text.matcher

    def guess(self, state: SimpleNamespace, max_tokens: int) -> list[int]:
        """What the grammar forces next."""
        return state.matcher.forced(max_tokens) if state.matcher else []

    def evidence(self, state: SimpleNamespace) -> int:
        """How long the forced text is, in tokens: short ones are mostly cut into others."""
        return len(state.matcher.forced(8))

    def observe(self, state: SimpleNamespace, verdict: Verdict) -> None:
        """The engine has told the matcher already."""
