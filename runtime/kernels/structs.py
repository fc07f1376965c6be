"""The structures of the C code for ctypes, read from its headers: what lies where is written once.

    STRUCTS["rope"]     decoder.h's `rope`, with width, cos and sin

A pointer to a structure that stands further up is a pointer here, too; others are addresses.
"""

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADERS = "linear.h", "recurrent.h", "sampling.h", "decoder.h", "chain.h"  # each uses earlier ones
_NUMBERS: dict[str, Any] = {
    "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64,
    "int": ctypes.c_int, "size_t": ctypes.c_size_t, "float": ctypes.c_float,
    "double": ctypes.c_double,
}  # fmt: skip
_DECLARED = re.compile(r"((?:\*|const\b|\s)*)(\w+)(?:\[(\d+)\])?")


def _structs() -> dict[str, Any]:
    structs: dict[str, Any] = {}
    for header in _HEADERS:
        code = re.sub("//.*", "", (Path(__file__).parent / "c" / header).read_text("utf-8"))
        for body, name in re.findall(r"typedef struct \w*\s*{([^}]*)} (\w+);", code):
            fields = {"_fields_": list(_fields(body, structs))}
            structs[name] = type(name, (ctypes.Structure,), fields)
    return structs


def _fields(body: str, known: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields declared as in `const float *x, *y;` or `const matrix *parts[4];`."""
    for kind, declared in re.findall(r"(?:const |struct )*(\w+) ([^;]+);", body):
        c_type = known.get(kind) or _NUMBERS.get(kind)
        for each in declared.split(","):
            stars, name, count = _DECLARED.fullmatch(each).groups()
            field_type = c_type
            if "*" in stars:
                field_type = ctypes.POINTER(c_type) if c_type in known.values() else ctypes.c_void_p
            yield name, field_type * int(count) if count else field_type


STRUCTS = _structs()
