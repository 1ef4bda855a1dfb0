"""Which worker holds which prefix: from KV events, or predicted from own routing."""

from .chain import (
    BlockNotFound,
    CapacityExhausted,
    IndexerDroppedRequest,
    InvalidBlockSequence,
    KvIndexError,
    ParentBlockNotFound,
)
from .overlap import CandidateOverlap, Overlap
from .predicted import ApproxIndex, deepest
from .prefix_index import KvIndex, Outcome

__all__ = [
    "ApproxIndex",
    "BlockNotFound",
    "CandidateOverlap",
    "CapacityExhausted",
    "IndexerDroppedRequest",
    "InvalidBlockSequence",
    "KvIndex",
    "KvIndexError",
    "Outcome",
    "Overlap",
    "ParentBlockNotFound",
    "deepest",
]
