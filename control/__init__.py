"""Who drafts and how much: statistics, costs, the controller that decides; and reading prompts."""

from .controller import Controller
from .planner import FixedK, Plan, Planner
from .reading import Reading
from .statistics import Statistics, Totals, clock

__all__ = [
    "Controller", "FixedK", "Plan", "Planner", "Reading", "Statistics", "Totals", "clock",
]  # fmt: skip
