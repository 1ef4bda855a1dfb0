"""Overlap and load to cost, cost to a worker. Pure."""

from .cost import Prompt, WorkerType, cache_credits, costs, delays
from .selector import Decision, WorkerSelector, pick, select_worker

__all__ = [
    "Decision",
    "Prompt",
    "WorkerSelector",
    "WorkerType",
    "cache_credits",
    "costs",
    "delays",
    "pick",
    "select_worker",
]
