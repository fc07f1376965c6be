"""Who drafts and how much: planner.py chooses, by what estimates.py believes."""

from .estimates import Costs
from .planner import Controller, Planner

__all__ = ["Controller", "Costs", "Planner"]
