"""Drafters by name: `load("ngram", context)`; from a file: `load("mine.py:Mine", context)`."""

import sys
from dataclasses import replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from inspect import getfile, getsourcelines, isabstract
from pathlib import Path
from pkgutil import resolve_name

from runtime.sampling import Noise
from runtime.values import PLAIN, Draft, Sampling, Verdict

from .base import MANY_WEIGHTS, Context, Drafter, first_choice, restoring_settings
from .checks import check_drafter
from .draft_model import check_words
from .plan import DraftedText, FixedK, Plan, Task
from .pool import AUTO, LOG, TREE, DrafterPool
from .timed import Fault, TimedDrafter, line_of

__all__ = [
    "LOG", "MANY_WEIGHTS", "NAMES", "Context", "Draft", "DraftedText", "Drafter", "DrafterPool",
    "FixedK", "Noise", "Plan", "Sampling", "Task", "Verdict", "check_name", "check_words",
    "class_from_file", "load", "load_all",
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


@restoring_settings()
def load(name: str, context: Context) -> Drafter:
    """Build the drafter `name`, or the class after the colon of `file.py:Class`.

    The latter may do anything, so each call of it has a limit of time (timed.py).

    Raises ValueError with one line that says what to do: an unknown name, a file or class that is
    not there, a class that is no drafter, or one that does not fit the target.
    """
    check_name(name, ())
    drafter_class = class_from_file(name) if ":" in name else resolve_name(_REGISTRY[name])
    try:
        drafter = drafter_class.build(context)
        check_drafter(drafter, context)
        return TimedDrafter(drafter, context.timeout_s) if ":" in name else drafter
    except ValueError:
        raise
    except (Exception, SystemExit) as error:  # a user's drafter may raise anything
        file, fault = getfile(drafter_class), Fault.of(error)
        what = f"drafter {name} failed to start: {fault}"
        if place := line_of(fault, file):
            raise ValueError(what + place) from error
        line = getsourcelines(drafter_class)[1]  # nothing of it ran
        needs = "write def __init__(self), or a class method build(cls, context)"
        if isabstract(drafter_class):
            needs = "write def propose(self, state, max_tokens)"
        raise ValueError(f"{what} ({file}, line {line}): {needs}") from error


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
    for name in dict.fromkeys([selected, *NAMES] if selected else NAMES):
        if name != selected and not chooses and resolve_name(_REGISTRY[name]).is_costly:
            continue
        try:
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


def class_from_file(name: str) -> type[Drafter]:
    """The class that file.py:Class names. Its file runs. Raises ValueError, as `load` does."""
    path_text, _, attribute = name.rpartition(":")
    path = Path(path_text)
    if not path.is_file():
        raise ValueError(f"drafter file {path_text!r} not found (expected file.py:Class)")
    spec = spec_from_file_location(f"own_drafter_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"drafter file {path_text!r} is not a Python file")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        place = line_of(fault := Fault.of(error), spec.origin or "")
        raise ValueError(f"drafter file {path_text!r} failed to load: {fault}{place}") from error
    drafter_class = getattr(module, attribute, None)
    if not (isinstance(drafter_class, type) and issubclass(drafter_class, Drafter)):
        if not isinstance(drafter_class, type) or drafter_class.__module__ != spec.name:
            raise ValueError(f"drafter file {path_text!r} has no class {attribute!r} of its own")
        where = f"{path_text}, line {getsourcelines(drafter_class)[1]}"
        raise ValueError(f"{attribute} is no drafter ({where}): write class {attribute}(Drafter)")
    if "name" not in vars(drafter_class):  # an inherited name is another drafter's
        drafter_class.name = attribute
    return drafter_class
