"""What computes: values, how tokens are chosen, KV caches, models, grammars and kernels."""

import functools
import logging
from importlib import import_module
from typing import Any


@functools.cache  # what is missing is logged once
def plug(name: str) -> Any:
    """The module `name`, which may be deleted: None without it, or without a package it needs."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        logging.getLogger("plugs").warning("going on without %s: %s", name, error)
        return None


def __getattr__(name: str) -> Any:
    """`kernels`: what computes in C, or in its place, where that is deleted, uncompiled.py."""
    if name != "kernels":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return plug("runtime.kernels") or import_module("runtime.uncompiled")
