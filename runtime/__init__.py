"""What computes: values, how tokens are chosen, KV caches, models, grammars and kernels."""

import logging
from importlib import import_module
from typing import Any

_FOLDERS = "runtime.kernels", "runtime.grammars", "drafters.auto", "server.page", "server.dialects"
_lacking = dict[str, str]()  # by plug, the module that was not found


def plug(name: str) -> Any:
    """The module `name`, which may be deleted: None without it, or without a package it needs."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if name not in _lacking:  # once
            logging.getLogger("plugs").warning("going on without %s: %s", name, error)
        _lacking[name] = str(error.name)
        return None


def lack(name: str) -> str:
    """What the plug `name` lacks: a file of this program, or a package."""
    found = _lacking[name]
    is_ours = found.startswith(("runtime.", "drafters.", "server."))
    path = found.replace(".", "/") + ("/" if found in _FOLDERS else ".py")
    return path if is_ours else f"the package {found}"


def __getattr__(name: str) -> Any:
    """`kernels`: what computes in C, or in its place, where that is deleted, uncompiled.py."""
    if name != "kernels":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return plug("runtime.kernels") or import_module("runtime.uncompiled")
