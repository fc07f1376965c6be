"""The core under a name that can be imported: its own begins with a digit."""

import importlib
import sys

sys.modules[__name__] = importlib.import_module("08_speculative_decoding")
