"""Measurements, run as `python -m benchmarks.NAME`; they share the core under one name."""

import importlib
import sys
from typing import Any

# A test run has imported it already; a second copy would have classes of its own.
core: Any = sys.modules.get("speculative_decoding") or importlib.import_module(
    "08_speculative_decoding"
)
