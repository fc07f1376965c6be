"""A request under way, and where its text ends."""

from contextlib import ExitStack
from typing import Any

from runtime.cache import Reading
from runtime.sampling import Noise
from runtime.statistics import Statistics
from runtime.text import TextStream
from runtime.values import Judgement, Request


class Sequence:
    """A request under way: its tokens, its row of the KV cache, its text, and its drafting."""

    def __init__(self, request: Request, row: int, tokenizer: Any) -> None:
        self.request, self.row, self.tokenizer = request, row, tokenizer
        known = () if request.sampling.is_coupled else request.prediction  # see Noise
        self.noise, self.tokens = Noise(request.seed, known), list(request.prompt)
        # A text goes on behind its prompt, and an answer in a chat begins anew.
        goes_on = getattr(request.prompt, "goes_on", True)
        self.before = request.prompt[-8:] if goes_on else []
        self.text, self.num_steps = TextStream(tokenizer, *request.ends, self.before), 0
        self.matcher = request.grammar and request.grammar.matcher()  # what may come next
        self.drafting: Any = None  # what drafters know of it: a DraftedText of drafters/plan.py
        self.opened = ExitStack()  # closes what it holds
        self.statistics, self.reading = Statistics(), Reading(request)
        self.logprobs: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.stop_token: int | None = None  # that ended the text
        self.failure: Exception | None = None  # with it the finish_reason is "error"

    @property
    def warnings(self) -> list[str]:
        return self.drafting.warnings

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def remaining(self) -> int:
        return len(self.request.prompt) + self.request.max_tokens - len(self.tokens)

    def fail(self, error: Exception) -> None:
        """End this sequence with an error; the others of its batch go on."""
        self.failure, self.finish_reason = error, "error"

    def append(self, judged: list[Judgement], eos_ids: set[int]) -> int:
        """Append what a cycle emits, up to the text's end. Returns how many tokens stay."""
        for num_kept, token in enumerate((j for j in judged if j.kind != "rejected"), 1):
            is_whole = self.matcher is not None and self.matcher.consume(token.id)
            if token.id in eos_ids or self.text.push(token.id, token.kind) or is_whole:
                self.finish_reason = "stop"
                ends = eos_ids | self.request.stop_token_ids  # else a stop string, or a grammar
                self.stop_token = token.id if token.id in ends else None
            elif self.remaining == 1:
                self.finish_reason = "length"
            self.tokens.append(token.id)
            if self.finish_reason:
                self.end(self.finish_reason)
                return num_kept
        return num_kept

    def end(self, reason: str = "stop") -> None:
        """Its text is complete."""
        # The last bytes may complete a stop string.
        self.finish_reason = "stop" if self.text.finish() else reason
