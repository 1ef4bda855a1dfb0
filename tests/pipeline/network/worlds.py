"""Builders for tests of pools and runtimes."""

from __future__ import annotations

from typing import Any

from pipeline import AsyncEngine
from pipeline.network import Runtime, Workers
from pipeline.network.inprocess import InProcessStore
from pipeline.protocols.card import ModelDeploymentCard
from pipeline.testing import ScriptedEngine

WHERE = "ns/comp/ep"
"""The endpoint under test."""


def engine_of(*items: Any) -> AsyncEngine[Any, Any]:
    """Return an engine that answers each request with these items."""
    return ScriptedEngine(items)


def card(name: str) -> ModelDeploymentCard:
    """Return a model card."""
    return ModelDeploymentCard.named(name, kv_cache_block_size=16)


def watchers(runtime: Runtime) -> int:
    """Return the number of open watches of the runtime's store."""
    assert isinstance(runtime._store, InProcessStore)
    return runtime._store.watchers


def record_changes(workers: Workers[Any, Any]) -> tuple[list[Any], Any]:
    """Return the list of the pool's changes, which grows with them, and the subscription."""
    received: list[Any] = []
    return received, workers.changes().subscribe(received.append, on_completed=lambda: received.append("completed"))
