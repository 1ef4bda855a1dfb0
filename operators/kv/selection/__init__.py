"""Overlap and load to cost, cost to a worker. Pure."""

from .cost import Prompt, WorkerType, cache_credits, costs, delays
from .selector import Decision, choose, pick

__all__ = ["Decision", "Prompt", "WorkerType", "cache_credits", "choose", "costs", "delays", "pick"]
