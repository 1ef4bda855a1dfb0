"""What the prefix index answers to an event or a question it cannot take; nothing of it stops the index.

Source: dynamo lib/kv-router/src/indexer, KvCacheEventError and KvRouterError; `status` is the label under which an
event with this end is counted there.
"""

from __future__ import annotations

from typing import ClassVar

from pipeline import PenstockError


class KvIndexError(PenstockError):
    """An event that was not applied, or not fully."""

    status: ClassVar[str] = "failed"


class ParentBlockNotFound(KvIndexError):
    """A store continues a block this rank does not hold. Nothing changed."""

    status = "parent_block_not_found"


class BlockNotFound(KvIndexError):
    """A removal names a block this rank does not hold. The other blocks it names are removed."""

    status = "block_not_found"


class InvalidBlockSequence(KvIndexError):
    """A store no cache can mean: a block below itself, twice in one line, or named by no u64. Nothing changed."""

    status = "invalid_block"


class CapacityExhausted(KvIndexError):
    """A store would give one rank more blocks than the index keeps of a rank. Nothing changed."""

    status = "capacity_exhausted"


class UnsupportedResidencyDomain(KvIndexError):
    """An event about blocks outside of the worker's own cache. Nothing changed."""

    status = "unsupported_residency_domain"


class IndexerDroppedRequest(KvIndexError):
    """A routing decision whose lists of hashes do not fit each other. Nothing was recorded."""

    status = "dropped_request"
