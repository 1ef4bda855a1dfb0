"""Scheduling of the mock engine: sequences, steps, blocks, and each engine's policy."""

from ...block_pool import BlockPool, OnEvent
from .policies import Burst, NoEvictPolicy, Policy, SglangPolicy, VllmPolicy, accept_rates
from .scheduler import Scheduler
from .sequence import AT_ONCE_TOKENS, Sequence, SequenceState, u32s
from .step import ROLES, StepResult

__all__ = [
    "AT_ONCE_TOKENS",
    "ROLES",
    "BlockPool",
    "Burst",
    "NoEvictPolicy",
    "OnEvent",
    "Policy",
    "Scheduler",
    "Sequence",
    "SequenceState",
    "SglangPolicy",
    "StepResult",
    "VllmPolicy",
    "accept_rates",
    "u32s",
]
