"""How a prompt is read, chunk by chunk, and what its tokens score.

    chunk · chunk · … · first cycle     a cycle reads at most a chunk, in one pass with other texts
    chunk · chunk · … · │ last token    of a prompt that is scored it reads one token
    chunk · chunk · … · the last chunk  where nothing is to be generated there is no cycle

Each chunk is a pass of its own, so its bits do not depend on who else is served.
"""

from typing import Any

from torch import Tensor

from runtime import plug
from runtime.values import Request

scoring = plug("runtime.scoring")  # without it requests for scores are refused
_MOST_ROWS = 128  # of logits at once: 78 MB where a vocabulary has 152,000 tokens


class Reading:
    """The prompt of one request."""

    def __init__(self, request: Request) -> None:
        self._prompt, self._num_top = request.prompt, request.prompt_logprobs
        self._generates = request.max_tokens > 0
        self._scores: dict[int, Any] = {}  # by the place of a chunk's first token

    def chunk(self, num_read: int, size: int) -> list[int]:
        """The tokens to read next, apart from others; none where the next cycle reads the rest."""
        left, most = len(self._prompt) - num_read, size
        if self._num_top is not None:
            most = min(size, _MOST_ROWS, left - self._generates)
        elif self._generates and left <= size:
            most = 0
        return self._prompt[num_read : num_read + most]

    def num_logits(self, chunk: list[int]) -> int:
        """For how many of a chunk's last tokens logits are wanted."""
        return 1 if self._num_top is None else len(chunk)

    def note(self, num_read: int, chunk: list[int], logits: Tensor) -> str | None:
        """Score what follows the tokens of a chunk, behind `num_read` ones, by logits [n, V].

        Returns the finish_reason, if no token is to be generated and this was the last chunk.
        Raises ValueError for logits that are no numbers.
        """
        end = num_read + len(chunk)
        if self._num_top is not None and (following := self._prompt[num_read + 1 : end + 1]):
            self._scores[num_read] = scoring.scores_of(logits, following, self._num_top)
        return None if self._generates or end < len(self._prompt) else "length"

    @property
    def scores(self) -> list[tuple[list[int], Any]]:
        """The prompt's tokens but for the first, which follows nothing: parts, and their scores."""
        return [
            (self._prompt[begin + 1 : begin + 1 + len(part.ranks)], part)
            for begin, part in sorted(self._scores.items())
        ]
