"""Computes models in C, with equal bits by construction: a row's depend on that row alone."""

from .library import alone as exclusive
from .start import get_ready as setup
from .start import report_of, speed_up
from .weights import num_weights

__all__ = ["exclusive", "num_weights", "report_of", "setup", "speed_up"]
