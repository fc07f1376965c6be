import importlib
import sys

sys.modules["speculative_decoding"] = importlib.import_module("08_speculative_decoding")
