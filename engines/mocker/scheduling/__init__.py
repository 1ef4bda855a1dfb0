"""Scheduling of the mock engine: sequences, steps, blocks, and each engine's policy."""

from .blocks import BlockPool, OnEvent
from .policies import (
    LONGEST_PREFIX_WAITING,
    UNBOUNDED,
    Burst,
    Load,
    NoEvictPolicy,
    Policy,
    SglangPolicy,
    VllmPolicy,
    accept_rates,
)
from .scheduler import ROLES, Role, Scheduler
from .sequence import AT_ONCE_TOKENS, Sequence, SequenceState, u32s
from .step import StepPlan, StepResult

__all__ = [
    "AT_ONCE_TOKENS",
    "LONGEST_PREFIX_WAITING",
    "ROLES",
    "UNBOUNDED",
    "BlockPool",
    "Burst",
    "Load",
    "NoEvictPolicy",
    "OnEvent",
    "Policy",
    "Role",
    "Scheduler",
    "Sequence",
    "SequenceState",
    "SglangPolicy",
    "StepPlan",
    "StepResult",
    "VllmPolicy",
    "accept_rates",
    "u32s",
]
