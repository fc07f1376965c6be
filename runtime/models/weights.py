"""Weights that are read from safetensors files, and checked, without transformers' loader."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, cached_file

from runtime.values import Model, in_short

FILE, _PICKLED = "model.safetensors", "pytorch_model.bin"


def read_folder(name: str, allow_pickle: bool | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What config.json says, and the weights, in one file or several; `name` may be a hub id.

    `allow_pickle`: whether weights may come from a file that can run code; None: they never do.
    Raises ValueError or OSError, saying what is missing.
    """
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if not name or (is_path and not Path(name).exists()):
        raise ValueError("there is no such folder")
    if (file := cached_file(name, "config.json")) is None:
        raise ValueError("it has no config.json")
    content = json.loads(Path(file).read_text("utf-8"))
    if files := weight_files(name):
        weights = map(load_file, files)
        return content, {key: weight for part in weights for key, weight in part.items()}
    if allow_pickle:
        file = cached_file(name, _PICKLED)
        return content, torch.load(file, map_location="cpu", weights_only=True)
    hint = f" (a {_PICKLED} can run code, and is loaded with --allow-pickle only)"
    raise ValueError(f"it has no {FILE}" + hint * (allow_pickle is not None))


def weight_files(name: str, explicit: str | None = None) -> list[str]:
    """The safetensors files of a model, one or several; none if it has none.

    `explicit` is the name of its file, or of an index, if that is not a usual one. Raises
    ValueError or OSError for an index that names what is no file in the model's folder: it would be
    opened, and a pipe would be waited for.
    """
    for each in [explicit] if explicit else [FILE, SAFE_WEIGHTS_INDEX_NAME]:
        if (file := cached_file(name, each, _raise_exceptions_for_missing_entries=False)) is None:
            continue
        if not file.endswith(".json"):
            return [file]
        try:
            content = json.loads(Path(file).read_text("utf-8"))
            content["metadata"].items()  # transformers asks for it
            parts = sorted({Path(part) for part in content["weight_map"].values()})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{each} needs a weight_map and metadata") from error
        # It may be a link, as the hub has them.
        if wrong := [part for part in parts if part.is_absolute() or ".." in part.parts]:
            raise ValueError(f"{each} names {wrong[0]}, which is outside its folder")
        find = partial(cached_file, name, _raise_exceptions_for_missing_entries=False)
        places = [find(str(part)) for part in parts]
        if None in places:
            raise ValueError(f"{each} names {parts[places.index(None)]}, which is no file")
        return places
    return []


@contextmanager
def reading(head: str) -> Iterator[None]:
    """Whatever fails within becomes a ValueError of one line that names the head.

    A broken folder raises any of a dozen kinds.
    """
    try:
        yield
    except Exception as error:
        raise ValueError(f"cannot use the {head}: {in_short(error)}") from error


def check_config(content: dict[str, Any], only: dict[str, Any]) -> None:
    """Raises ValueError if a field has another value than the one that is served."""
    for name, served in only.items():
        if content.get(name, served) != served:
            raise ValueError(f"{name} is {content[name]!r}, supported is {served!r}")


def fill(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load weights. Raises ValueError if one is missing, unknown or of another size."""
    wanted = module.state_dict()
    for key in sorted(wanted.keys() ^ weights.keys()):
        raise ValueError(f"{'it lacks' if key in wanted else 'unknown weight'} {key}")
    for key, weight in weights.items():
        if weight.shape != wanted[key].shape:
            actual, expected = list(weight.shape), list(wanted[key].shape)
            raise ValueError(f"{key} is {actual} instead of {expected}")
        if weight.is_floating_point() != wanted[key].is_floating_point():
            raise ValueError(f"{key} has numbers of another kind, {weight.dtype}")
    module.load_state_dict(weights)


def check_numbers(module: nn.Module) -> None:
    """Raises ValueError for a weight with a NaN or an infinite number: no request could use it."""
    for key, weight in module.state_dict().items():
        if not weight.sum(dtype=torch.float32).isfinite():  # a sum of float16 may overflow
            raise ValueError(f"{key} has numbers that are NaN or infinite")


def check_sizes(hidden_size: int, vocab_size: int, target: Model) -> None:
    """Raises ValueError if a head was trained for another target, by what it reads and writes."""
    width = target.model.config.get_text_config().hidden_size
    if hidden_size != width:
        raise ValueError(
            f"it reads states of {hidden_size} numbers, and those of {target.name} have {width}"
        )
    if vocab_size != target.vocab_size:
        raise ValueError(
            f"it was trained for a vocabulary of {vocab_size} tokens, and "
            f"{target.name} has {target.vocab_size}"
        )
