"""A drafter that somebody wrote: `mine.py:Mine`. Its file may do anything, so all of it is doubted.

timed.py gives each of its calls a limit of time.
"""

import sys
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from inspect import getfile, getsourcelines, isabstract, signature
from pathlib import Path

from .base import Context, Drafter
from .timed import Fault, TimedDrafter, line_of, restoring_settings


def load(name: str, context: Context) -> Drafter:
    """Build the class after the colon of `file.py:Class`.

    Raises ValueError with one line that says what to do: a file or class that is not there, a class
    that is no drafter, or one that does not fit the target.
    """
    changed = set[str]()
    with restoring_settings(changed):
        drafter_class = class_from_file(name)
        try:
            inner = drafter_class.build(context)
            check_drafter(inner, context)
            drafter = TimedDrafter(inner, context.timeout_s)
        except ValueError:
            raise
        except (Exception, SystemExit) as error:
            file, fault = getfile(drafter_class), Fault.of(error)
            what = f"drafter {name} failed to start: {fault}"
            if place := line_of(fault, file):
                raise ValueError(what + place) from error
            needs = "write def __init__(self), or a class method build(cls, context)"
            if isabstract(drafter_class):
                needs = "write def propose(self, state, max_tokens)"
            # Nothing of it ran.
            raise ValueError(f"{what} ({file}{_line_of(drafter_class)}): {needs}") from error
    drafter.changed_settings |= changed
    return drafter


def _line_of(made: type) -> str:
    """Where a class begins in its file; "" for one that no statement made. Example: ", line 5"."""
    with suppress(OSError):
        return f", line {getsourcelines(made)[1]}"
    return ""


def check_drafter(drafter: Drafter, context: Context) -> None:
    """Raises ValueError if it says something of itself that cannot be."""
    if not isinstance(drafter, Drafter):
        raise ValueError(f"build returned a {type(drafter).__name__}: write return cls(...)")
    if not (isinstance(drafter.name, str) and drafter.name):
        kind = type(drafter).__name__
        raise ValueError(f'name of {kind} is {drafter.name!r:.100}: write name = "{kind.lower()}"')
    for name in ("block_size", "num_step_weights"):
        if not isinstance(size := getattr(drafter, name), int) or not 0 <= size <= sys.maxsize:
            wrong = f"{name} of {drafter.name} is {size!r:.100}"
            raise ValueError(f"{wrong}: write 0 or more, less than 2^63")
    if type(drafter).attach is not Drafter.attach:
        kind = type(drafter).attach.__qualname__.partition(".")[0]
        what = f"{drafter.name} needs {kind}.attach, which is not called for a drafter from a file"
        raise ValueError(f"{what}: derive it from Drafter, without attach")
    for name in ("open", "propose", "propose_batch", "observe", "close"):
        wanted, method = [*signature(getattr(Drafter, name)).parameters], getattr(drafter, name)
        try:
            signature(method).bind(*wanted[1:])
        except TypeError as error:
            place = line_of(error, getfile(type(drafter)), method)
            what = f"{name} of {drafter.name} is called with other arguments{place}"
            raise ValueError(f"{what}: write def {name}({', '.join(wanted)})") from error
    if not drafter.needs_hidden or context.target is None:
        return
    num_layers = context.target.model.config.get_text_config().num_hidden_layers
    layers, able = drafter.hidden_layers, range(-1, num_layers - 1)
    listed = layers if isinstance(layers, (tuple, list)) else ()
    if not listed or not all(type(i) is int and i in able for i in listed):
        raise ValueError(
            f"hidden_layers of {drafter.name} are {layers!r:.100}: write a tuple of -1 (the final "
            f"norm) and of numbers from 0 to {num_layers - 2}, such as (-1,)"
        )


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
        where = f"{path_text}{_line_of(drafter_class)}"
        raise ValueError(f"{attribute} is no drafter ({where}): write class {attribute}(Drafter)")
    if "name" not in vars(drafter_class):  # an inherited name is another drafter's
        drafter_class.name = attribute
    return drafter_class
