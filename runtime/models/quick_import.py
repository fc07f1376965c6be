"""Imports torch and transformers, in a second less than they take by themselves.

What transformers brings for compiling and for training on several machines stays out: a thousand
modules.
"""

import functools
import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_ALONE = f"{_COMPILER}._trace_wrapped_higher_order_op"  # what transformers imports of it


class _Compiler(ModuleType):
    """Stands for torch's compiler, until anything else than to mark functions is asked of it.

    An import of a part of the compiler comes here, too: first the compiler itself is imported.
    """

    @staticmethod
    def disable(function: Any = None, *_: Any, **__: Any) -> Any:
        """The function itself, from a decorator with arguments or without."""
        return function if callable(function) else _Compiler.disable

    allow_in_graph = assume_constant_result = disable

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "find_", "invalidate_")):  # what importlib asks of finders, too
            raise AttributeError(name)
        return getattr(self.create_module(ModuleSpec(_COMPILER, None)), name)

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        is_part = name.startswith(f"{_COMPILER}.") and name != _ALONE
        return ModuleSpec(name, self) if is_part else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
            sys.meta_path.remove(self)
        return importlib.import_module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the module was run when it was imported."""


def _cached(*given: Any, **options: Any) -> Any:
    """lru_cache. transformers reads the names in its 2,600 files once, and no lines before them."""
    if not given or getattr(given[0], "__name__", "") != "create_import_structure_from_path":
        return lru_cache(*given, **options)
    names = given[0].__globals__
    usual = names["fetch__all__"]
    names["fetch__all__"] = lambda text: usual(text[text.rfind("\n__all__") + 1 :])
    return lru_cache(None)(given[0])


if "transformers" not in sys.modules and _COMPILER not in sys.modules:
    import torch.distributed

    sys.meta_path.insert(0, compiler := _Compiler(_COMPILER))
    compiler.__path__ = [f"{torch.__path__[0]}/_dynamo"]
    sys.modules[_COMPILER] = compiler
    is_available, lru_cache = torch.distributed.is_available, functools.lru_cache
    torch.distributed.is_available, functools.lru_cache = lambda: False, _cached
    try:
        import transformers.masking_utils
        import transformers.modeling_utils  # noqa: F401
    finally:
        torch.distributed.is_available, functools.lru_cache = is_available, lru_cache
