"""Migration: a broken stream continues on another worker, and no token is repeated."""

from .metrics import MigrationMetrics
from .operator import Migration
from .policy import (
    Failure,
    Verdict,
    behind,
    continuation,
    decide,
    ending,
    error_shown,
    is_pinned,
    is_too_long,
    restriction,
)

__all__ = [
    "Failure",
    "Migration",
    "MigrationMetrics",
    "Verdict",
    "behind",
    "continuation",
    "decide",
    "ending",
    "error_shown",
    "is_pinned",
    "is_too_long",
    "restriction",
]
