"""Import transformers without what it brings for training on several machines and for compiling.

transformers and torch have functions that are marked for torch's compiler, and transformers imports
torch.distributed.tensor wherever torch was built with it. Both bring a thousand modules, and a
server would start a second later for code that it never runs. So in the compiler's place stands a
module that leaves marked functions as they are, and is replaced by the compiler once anything else
is asked of it. And while transformers is imported, torch says that it is not distributed.

transformers also reads its 2,600 files twice, line by line, for the names that they export. Here it
reads them once, and no lines before the names.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed

_COMPILER = "torch._dynamo"
_MARKS = "disable", "allow_in_graph", "assume_constant_result"
_SCAN, _NAMES = "create_import_structure_from_path", "fetch__all__"  # in transformers
_ALONE = f"{_COMPILER}._trace_wrapped_higher_order_op"  # what transformers imports of it


def _marked(function: Any = None, *_: Any, **__: Any) -> Any:
    """The function itself, from a decorator with arguments or without."""
    return function if callable(function) else _marked


class _LazyCompiler(ModuleType):
    __path__ = [f"{torch.__path__[0]}/_dynamo"]

    def __getattr__(self, name: str) -> Any:
        if name in _MARKS:
            return _marked
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_load(), name)


class _Parts:
    """Finds parts of the compiler for an import: before any of them comes the compiler itself."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(f"{_COMPILER}.") or name == _ALONE:
            return None
        _load()
        return ModuleSpec(name, _Parts)

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Does nothing: the module was run when it was imported."""


def _load() -> ModuleType:
    """The compiler, imported in the place of its lazy module."""
    if isinstance(sys.modules.get(_COMPILER), _LazyCompiler):
        del sys.modules[_COMPILER]
        sys.meta_path.remove(_Parts)
    return importlib.import_module(_COMPILER)


def _cached(*given: Any, **options: Any) -> Any:
    """functools.lru_cache, which keeps all of what transformers reads of its own files."""
    if [getattr(function, "__name__", None) for function in given] != [_SCAN]:
        return lru_cache(*given, **options)
    names = given[0].__globals__
    names[_NAMES] = partial(_names, names[_NAMES])
    return lru_cache(None)(*given)


def _names(usual: Callable[[str], list[str]], content: str) -> list[str]:
    """What a file exports: as `usual` reads it, without the lines before the last __all__."""
    return usual(content[content.rfind("\n__all__") + 1 :])


if "transformers" not in sys.modules and _COMPILER not in sys.modules:
    sys.modules[_COMPILER] = _LazyCompiler(_COMPILER)
    sys.meta_path.insert(0, _Parts)
    is_available, functools.lru_cache = torch.distributed.is_available, _cached
    torch.distributed.is_available = lambda: False
    try:
        import transformers.masking_utils
        import transformers.modeling_utils  # noqa: F401
    finally:
        torch.distributed.is_available, functools.lru_cache = is_available, lru_cache
