"""Registration: one worker in discovery, from its card to its withdrawal.

    card ──► serve: KV event logs, then the worker itself ──► withdraw: unpublish ─ grace ─ refuse new requests ──► cut

Source: dynamo lib/backend-common/src/worker.rs, Worker.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import anyio

from pipeline import AsyncEngine, Control

from ..kv_events import KvEventLogs
from ..llm import EngineConfig
from .card import card_of, model_folder
from .config import WorkerConfig

if TYPE_CHECKING:
    from pipeline.network import EndpointId, Runtime, Served
    from pipeline.protocols.card import ModelDeploymentCard

_log = logging.getLogger(__name__)


class Registration:
    """The card and the served endpoints of one worker. `shutdown` cuts `serve` short once it is stopped."""

    def __init__(
        self, runtime: Runtime, endpoint: EndpointId, worker_id: int, kv_logs: KvEventLogs, shutdown: Control
    ) -> None:
        self.card: ModelDeploymentCard | None = None
        """The card, once it is made."""
        self.served: Served | None = None
        """The served endpoint; None before, and for a worker that was shut down before."""
        self._runtime, self._endpoint, self._worker_id = runtime, endpoint, worker_id
        self._kv_logs, self._shutdown = kv_logs, shutdown

    async def make_card(self, worker: WorkerConfig, engine: EngineConfig, environment: Mapping[str, str]) -> None:
        """Make the card. Raises InvalidArgument as `card_of`."""
        if model_folder(worker) is None and worker.custom_jinja_template is None:
            card = card_of(worker, engine, environment)
        else:  # its files are read whole, meanwhile other workers of this loop go on
            card = await anyio.to_thread.run_sync(card_of, worker, engine, environment)
        card.runtime_config.enable_local_indexer = self._kv_logs.answers
        self.card = card

    async def serve(self, engine: AsyncEngine[Any, Any]) -> None:
        """Serve the engine and register it, unless a shutdown comes first. Raises as `Runtime.serve`."""
        with anyio.CancelScope() as scope:
            forget = self._shutdown.on_stop(scope.cancel)
            try:
                await self._kv_logs.serve(self._runtime)  # first: routers recover from it once they see the worker
                self.served = await self._runtime.serve(
                    self._endpoint, engine, card=self.card, instance_id=self._worker_id
                )
            finally:
                forget()

    async def withdraw(self, grace_s: float) -> None:
        """Remove it from discovery, serve on for the grace period, then refuse new requests."""
        if self.served is None:
            return
        try:
            await self.served.unpublish()
        except Exception:
            _log.warning("%s/%x could not be unregistered", self._endpoint.path, self._worker_id, exc_info=True)
        await self._kv_logs.withdraw()
        await anyio.sleep(grace_s)
        await self.served.withdraw()

    def abort(self) -> None:
        """Disappear at once, as in a crash."""
        if self.served is not None:
            self.served.abort()
        self._kv_logs.abort()
