"""Migration: a broken stream continues on another worker, and no token is repeated."""

from .attempts import MigrationMetrics
from .operator import Migration
from .policy import (
    Break,
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
    "Break",
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
