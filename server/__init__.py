"""What speaks: options, the worker, requests and their answers, over HTTP and in a terminal."""

from importlib import import_module
from typing import Any

# No statement can import a name that begins with a digit. The core imports this folder in functions
# alone, so that it is whole by now.
core: Any = import_module("08_speculative_decoding")
