"""A draft model with another tokenizer is tried before it is used: such pairs often disappoint.

The trial writes the demo prompts' texts with it, and a few of them without. Then it reckons from
what was accepted and what passes took how fast the best K would be here, for one request.
"""

from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from statistics import median
from typing import NamedTuple

from drafters.translated import TranslatedDrafter
from runtime.models import StartError
from runtime.models.loading import PROGRESS
from runtime.models.prompts import read_prompts
from runtime.values import Cycle, Engine, Request, RequestError

from .demo import request_of
from .options import Options
from .warming import uncounted
from .worker import LOG

_MOST, _TOKENS = 4, 16  # drafted tokens in a cycle; tokens of each text


class Trial(NamedTuple):
    """What a draft model brought in texts of several kinds, for one request."""

    num_texts: int
    reach: list[float]  # how often the first 1, 2, … drafted tokens were accepted
    plain_ms: float  # a pass without a draft
    row_ms: float  # what each drafted token adds to a pass
    step_ms: float  # a draft's time by its number of tokens

    @property
    def speedup(self) -> float:
        """The speed in that of plain decoding, with the K from 1 on that is best.

        Example: reach .8, .6 and a pass of 10 ms, 1 ms more by a token and 2 to draft it:
        1.8 / 1.3 = 1.38 with one token, 2.4 / 1.6 = 1.5 with two.
        """
        token = (self.row_ms + self.step_ms) / self.plain_ms
        _, *tokens = accumulate(self.reach, initial=1.0)
        return max(each / (1 + k * token) for k, each in enumerate(tokens, 1))


def judge(engine: Engine, options: Options) -> None:
    """Try a draft model with another tokenizer. Raises StartError if it does not pay.

    Who names the drafter has it without a trial.
    """
    drafter = engine.pool.drafters.get(TranslatedDrafter.name)
    if not isinstance(drafter, TranslatedDrafter):
        return
    name = engine.draft_model.name
    what = (
        f"draft model {name} has another tokenizer than the target, and "
        f"{drafter.words.share:.0%} of the target's tokens"
    )
    if options.drafter == TranslatedDrafter.name:  # it was asked for
        LOG.info("%s: used without a trial", what)
        return
    PROGRESS.info("trying %s, which has another tokenizer than the target", name)
    trial = run(engine, options)
    what += (
        f": in {trial.num_texts} texts {trial.reach[0]:.0%} of its first guesses were accepted, "
        f"which gives {trial.speedup:.2f} of plain decoding's speed here"
    )
    if trial.speedup <= 1:
        raise StartError(f"{what}: name another one, or give --drafter draft_model")
    LOG.info("%s", what)


def run(engine: Engine, options: Options) -> Trial:
    """Write the demo prompts' texts, one after the other; a chat model answers."""
    texts = list(read_prompts(options.is_chat(engine.target.tokenizer)).values())
    fields = {"max_tokens": _TOKENS, "num_speculative_tokens": _MOST, "temperature": 0}
    requests = list[Request]()
    for text in texts:
        with suppress(RequestError):  # it has no room in a short context
            requests.append(request_of(text, engine, options, **fields))
    tried = [each for request in requests for each in _cycles(engine, request, drafts=True)]
    plain = [each for request in requests[::6] for each in _cycles(engine, request, drafts=False)]
    if not (tried and plain):  # the target ends all texts at once
        return Trial(len(requests), [0.0], 1.0, 0.0, 0.0)
    counts = [cycle.num_accepted for cycle in tried]
    reach = [sum(n >= k for n in counts) / len(counts) for k in range(1, _MOST + 1)]
    plain_ms, drafted = median(map(_pass_ms, plain)), [each for each in tried if each.num_drafted]
    rows_ms = [(_pass_ms(each) - plain_ms) / each.num_drafted for each in drafted]
    steps_ms = [(each.times[1] - each.times[0]) * 1e3 / _MOST for each in tried]
    row_ms = max(0.0, median(rows_ms or [0.0]))
    return Trial(len(requests), reach, plain_ms, row_ms, median(steps_ms))


def _cycles(engine: Engine, request: Request, drafts: bool) -> list[Cycle]:
    """The cycles of a text in which a whole draft was possible; the prompt's pass is none."""
    drafter = TranslatedDrafter.name if drafts else None
    twin = uncounted(engine)
    twin.pool.is_strict = False  # who fails here does not pay
    cycles = twin.generate(replace(request, drafter=drafter, isolated=True))
    return [cycle for s, cycle in cycles if cycle.number and s.remaining >= _MOST]


def _pass_ms(cycle: Cycle) -> float:
    return (cycle.times[2] - cycle.times[1]) * 1e3
