"""Who drafts and how much: statistics, costs and the controller that decides by them."""

from .controller import Controller
from .planner import FixedK, Plan, Planner
from .statistics import Statistics, Totals, clock

__all__ = ["Controller", "FixedK", "Plan", "Planner", "Statistics", "Totals", "clock"]
