"""The run that the page opens on: recorded once, as soon as nobody waits, and shown to everybody.

    record(engine) → {model, drafter, prompt, cycles, plain_ms, costs, weights, …}

A few cycles of plain decoding and of every drafter that comes with the project tell what each of
them costs and gains here. The first that pays then tells the story, or else whoever gains most: one
short request with a trace. Nothing of it is counted in /health or learnt by the controller. A fault
costs the story, and nothing else.

To renew the one that is shown while a model loads, from the repository's root:

    curl -s localhost:5000/page/story.json > page/stored_story.json
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import zip_longest
from statistics import median
from typing import Any

from control.planner import FixedK
from control.statistics import Totals
from drafters.timed import TimedDrafter
from messages import Cycle, Engine, Json, Request, TextSequence
from models.prompts import chat_ids, prompt_ids

from . import trace
from .options import Options
from .parsing import model_id

# Who may tell it, if loaded: those first whose guesses differ most from the target's own.
_TELLERS = ("draft_model", "eagle3", "mtp", "dflash", "self_int8", "ngram")
_PROMPT = "def read_lines(path):\n    with open(path) as f:\n        return f."
_CHAT_PROMPT = "Name the days of the week, then the months of the year."
_K, _MAX_TOKENS, _NUM_CYCLES = 5, 40, 12  # the last is of plain decoding, and of each that is tried
_PAYS = 1.1  # times the speed of plain decoding
_LONGEST_S = 1.0  # of trying all drafters, and of telling: a slow model tells less

LOG = logging.getLogger(__name__)


@contextmanager
def uncounted(engine: Engine) -> Iterator[Engine]:
    """The same models and drafters, whose runs no statistics count and no controller learns from.

    The log does not tell of them either.
    """
    twin = copy(engine)
    twin.panel, twin.planner = copy(engine.panel), FixedK()
    twin.totals, twin.panel.failures = Totals(engine.panel.choices), Counter()
    told = logging.getLogger("drafters")
    told.disabled = True
    try:
        yield twin
    finally:
        told.disabled = False


class Interrupted(Exception):
    """Somebody waits for the engine."""


def record(
    engine: Engine, options: Options, is_wanted: Callable[[], bool] = lambda: False
) -> Json | None:
    """The story as JSON has it, in a second or so; None where no drafter can tell it.

    Raises Interrupted as soon as the engine `is_wanted` for something else.
    """
    own = engine.panel.drafters
    names = [n for n in _TELLERS if n in own and not isinstance(own[n], TimedDrafter)]
    if not names:
        return None
    try:
        with uncounted(engine) as twin:
            return _record(twin, options, names, is_wanted)
    except Interrupted:
        raise
    except Exception as error:
        LOG.debug("no story was recorded: %s", error)
        return None


def _record(
    engine: Engine, options: Options, names: list[str], is_wanted: Callable[[], bool]
) -> Json:
    target, drafters = engine.target, engine.panel.drafters
    is_chat = options.is_chat(target.tokenizer)
    text, read = (_CHAT_PROMPT, chat_ids) if is_chat else (_PROMPT, prompt_ids)
    prompt = read(text, target.tokenizer, target.max_length)

    def run(drafter: str | None, num_cycles: int, limit_s: float, **more: Any) -> Iterator[tuple]:
        """Each cycle with its sequence, until the drafter has taken so long."""
        spent_s = 0.0
        request = Request(prompt, _MAX_TOKENS, drafter, _K, is_alone=True, **more)
        for s, cycle in engine.generate(request):
            if is_wanted():
                raise Interrupted
            yield s, cycle
            spent_s += cycle.times[-1] - cycle.times[0]
            if cycle.number >= num_cycles or (cycle.number > 1 and spent_s > limit_s):
                return

    # In turn, so that a busy machine slows all. A cache of few rows holds one after the other.
    sides = [run(name, _NUM_CYCLES, _LONGEST_S / len(names)) for name in [None, *names]]
    rounds = zip_longest(*sides if target.cache.num_rows >= len(sides) else map(list, sides))
    plain, *tried = ([pair[1] for pair in side if pair] for side in zip(*rounds, strict=True))
    plain_ms = median(cycle.spans_ms[1] for cycle in plain[1:])
    costs = {name: _costs(run, drafters[name]) for name, run in zip(names, tried, strict=True)}
    gains = {
        name: _gain(run, costs[name], plain_ms) for name, run in zip(names, tried, strict=True)
    }
    able = [name for name in names if costs[name]["step_ms"] is not None]
    if not able:
        raise ValueError("nobody proposed anything")
    teller = next((name for name in able if gains[name] >= _PAYS), max(able, key=gains.get))
    told = run(teller, _MAX_TOKENS, _LONGEST_S, trace=True)
    return {
        "stored": False,
        "model": model_id(target.name),
        "drafter": teller,
        "prompt": text,
        "chat": is_chat,
        "cycles": [_event(*pair) for pair in told],
        "plain_ms": plain_ms,
        "gains": gains,
        "costs": costs,
        "target": weights_of(engine, options),
    }


def _gain(cycles: list[Cycle], costs: Json, plain_ms: float) -> float:
    """Their speed in plain decoding's, by medians, as the first draft reads the prompt."""
    later = cycles[1:]
    drafted = [cycle for cycle in later if cycle.proposals]
    spent_ms = (len(later) - len(drafted)) * plain_ms
    for cycle in drafted:
        spent_ms += len(cycle.proposals) * costs["step_ms"] + costs["verify_ms"]
    return sum(len(cycle.tokens) for cycle in later) * plain_ms / spent_ms if later else 0.0


def _event(s: TextSequence, cycle: Cycle) -> Json:
    """A cycle as the stream of a traced request shows it, without what a story does not show."""
    event = trace.event(s, cycle)
    event["text"] = "".join(text for text, _ in event.pop("pieces"))
    for name in ("distributions", "target_top", "drafter"):
        event.pop(name, None)
    known = {*event["proposals"], *(token["id"] for token in event["tokens"])}
    event["texts"] = {i: text for i, text in event["texts"].items() if i in known}
    return event


def _costs(cycles: list[Cycle], drafter: object) -> Json:
    """What drafting takes: ms per drafted token, ms of the passes over K + 1, and its weights."""
    drafted = [cycle for cycle in cycles if cycle.proposals]  # so without the prefill
    steps = [cycle.spans_ms[0] / len(cycle.proposals) for cycle in drafted]
    whole = [cycle for cycle in drafted if len(cycle.proposals) == _K] or drafted
    return {
        "step_ms": median(steps) if steps else None,
        "verify_ms": median(cycle.spans_ms[1] for cycle in whole) if whole else None,
        "parameters": getattr(drafter, "num_step_weights", 0),
    }


def weights_of(engine: Engine, options: Options) -> Json:
    """The target in numbers: what a pass reads, and how much a text may hold."""
    target = engine.target
    config = target.model.config.get_text_config()
    size = 1 if options.quantize == "int8" else target.model.dtype.itemsize
    kind, num_bytes = str(target.model.dtype).removeprefix("torch."), target.num_weights * size
    if target.fingerprint:  # a file as it is
        kind, num_bytes = "packed", target.fast.num_bytes
    return {
        "parameters": target.num_weights,
        "layers": config.num_hidden_layers,
        "dtype": options.quantize or kind,
        "weight_bytes": num_bytes,
        "vocabulary": target.vocab_size,
        "context": target.max_length,
    }
