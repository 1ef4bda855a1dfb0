"""Which worker holds which prefix: from KV events, or predicted from own routing."""

from .block_run import (
    BlockNotFound,
    CapacityExhausted,
    InvalidBlockSequence,
    KvIndexError,
    ParentBlockNotFound,
)
from .overlap import CandidateOverlap, Overlap, in_tokens
from .predicted import PredictedIndex
from .prefix_index import KvIndex, Outcome

__all__ = [
    "BlockNotFound",
    "CandidateOverlap",
    "CapacityExhausted",
    "InvalidBlockSequence",
    "KvIndex",
    "KvIndexError",
    "Outcome",
    "Overlap",
    "ParentBlockNotFound",
    "PredictedIndex",
    "in_tokens",
]
