"""Drafters by name: `load("ngram", context)`; from a file: `load("mine.py:Mine", context)`."""

from dataclasses import replace
from importlib.util import find_spec

from runtime.models import required
from runtime.sampling import Noise
from runtime.values import PLAIN, Draft, Sampling, Verdict, in_short

from .base import MANY_WEIGHTS, Context, Drafter, first_choice
from .draft_model import have_same_words
from .plan import DraftedText, FixedK, Plan, Task
from .pool import AUTO, LOG, TREE, DrafterPool

__all__ = [
    "LOG", "MANY_WEIGHTS", "NAMES", "Context", "Draft", "DraftedText", "Drafter", "DrafterPool",
    "FixedK", "Noise", "Plan", "Sampling", "Task", "Verdict", "check_name", "have_same_words",
    "load", "load_all",
]  # fmt: skip

# By name; a module is imported when its drafter is first asked for, and may be deleted.
_REGISTRY = {
    "ngram": "drafters.ngram:NgramDrafter",
    "suffix": "drafters.suffix:SuffixDrafter",
    "grammar": "drafters.grammar:GrammarDrafter",
    "draft_model": "drafters.draft_model:DraftModelDrafter",
    "mtp": "drafters.mtp:MtpDrafter",
    "eagle3": "drafters.eagle3:Eagle3Drafter",
    "dflash": "drafters.dflash:DFlashDrafter",
    "self_int8": "drafters.self_int8:SelfInt8Drafter",
    "prediction": "drafters.prediction:PredictionDrafter",
}
NAMES = tuple(name for name, place in _REGISTRY.items() if find_spec(place.partition(":")[0]))
_OTHERS = AUTO, TREE, PLAIN  # what a request may ask for beside a drafter


def check_name(name: str | None, others: tuple[str, ...] = _OTHERS) -> None:
    """Raises ValueError for a name that is no drafter's and none of `others`.

    A file and its class are not looked for.
    """
    if not (name is None or ":" in name or name in (*NAMES, *others)):
        choices = ", ".join([*NAMES, *_OTHERS])
        raise ValueError(f"unknown drafter {name!r}: choose {choices} or file.py:Class")


def load(name: str, context: Context) -> Drafter:
    """Build the drafter `name`, or the class after the colon of `file.py:Class` (from_file.py).

    Raises ValueError with one line that says what to do: an unknown name, or one that does not fit
    the target.
    """
    check_name(name, ())
    if ":" in name:
        return required("drafters.from_file", "a drafter from a file").load(name, context)
    try:
        return _class_of(name).build(context)
    except ValueError:
        raise
    except Exception as error:  # a head's folder raises any of a dozen kinds
        raise ValueError(f"drafter {name} failed to start: {in_short(error)}") from error


def _class_of(name: str) -> type[Drafter]:
    """The class of one of NAMES. Raises ValueError where what it needs is deleted."""
    module, _, attribute = _REGISTRY[name].partition(":")
    return getattr(required(module, f"drafter {name}"), attribute)


def load_all(
    wanted: str | None, context: Context, may_choose: bool
) -> tuple[dict[str, Drafter], str]:
    """Every drafter that fits, by name, and the default's name.

    `wanted` is what the command line says: a drafter, auto, tree, "none" (plain decoding), or
    nothing. Then the default is auto, where there is a choice and `may_choose` allows it. Raises
    ValueError if one asked for does not fit.
    """
    loaded: dict[str, Drafter] = {}
    selected = wanted if wanted not in _OTHERS else None
    chooses = wanted in (AUTO, TREE) or (wanted is None and may_choose)
    context = replace(context, wanted=selected)
    default, asked = wanted, {selected, *context.named}
    for name in dict.fromkeys(filter(None, [selected, *NAMES, *context.named])):
        try:
            if name != selected and not chooses and _class_of(name).is_costly:
                continue
            drafter = load(name, context)
        except ValueError as error:
            if name in asked:
                raise
            if getattr(context, name.removesuffix("_model"), None):  # it came with the target
                LOG.warning("going on without %s: %s", name, error)
            continue  # this target has no MTP head, say
        if drafter.name in (*loaded, *_OTHERS):
            raise ValueError(f"the name {drafter.name!r} of {selected} is taken: give it another")
        loaded[drafter.name] = drafter
        if name == selected:
            default = drafter.name
    if wanted is None:
        default = AUTO if len(loaded) > 1 and may_choose else first_choice(loaded)
    return loaded, default
