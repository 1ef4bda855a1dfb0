"""The load of a server's ranks, published as that of the worker in front of it.

    vLLM      GET /metrics, now and then ──► VllmLoad ──┐
    SGLang    PUB socket of a rank ──► load_stat ───────┴─► ComponentSnapshot ──► SnapshotPublisher ──► ActiveLoad

| what                    | vLLM                                | SGLang                                       |
|-------------------------|-------------------------------------|----------------------------------------------|
| `kv_used_blocks`        | `vllm:kv_cache_usage_perc` x blocks | tokens in use, in whole blocks               |
| `active_decode_blocks`  | the same: what only rests in the cache counts as free at both                  ||
| `active_prefill_tokens` | unknown                             | uncached tokens of the requests that wait    |
| `kv_cache_hit_rate`     | of the prompts since the last look  | unknown                                      |

Source: vllm/v1/metrics/loggers.py; sglang/srt/managers/scheduler_components/load_publisher.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import anyio

from pipeline import InvalidArgument, PenstockError
from pipeline.errors import EngineShutdown, InvalidMessage
from pipeline.llm.kv_events import EventSockets, Link
from pipeline.wire import from_msgpack

from ..publishing import ComponentSnapshot, MetricsBindings, SnapshotPublisher
from .client import Client
from .errors import of_status
from .facts import ServerFacts
from .http_exchange import fetched
from .prometheus_text import samples, whole

_log = logging.getLogger(__name__)

ReadLoad = Callable[[str], Mapping[int, ComponentSnapshot]]
"""Returns the load of each rank in a page of metrics."""

METRICS = "/metrics"
_POLL_S = 5.0
"""Longest wait for a page of metrics."""
_STAT_BYTES = 4096
"""More than any message of the load has."""
_WARNINGS = 3

_USAGE = "vllm:kv_cache_usage_perc"
_QUERIES, _HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


class VllmLoad:
    """Reads pages of a vLLM server's metrics, one after another: the hit rate is that since the page before."""

    def __init__(self, facts: ServerFacts) -> None:
        self._facts = facts
        self._counted: dict[int, tuple[float, float]] = {}

    def read(self, text: str) -> dict[int, ComponentSnapshot]:
        """Return the load of each rank in the page. A rank without its usage, or of unknown size, is left out.

        Raise EngineShutdown for the page of a server that was started again. Behind a proxy no connection shows it.
        """
        started = next(samples(text, "process_start_time_seconds"), None)
        if started is not None and self._facts.incarnation not in (None, str(started.value)):
            raise EngineShutdown("the server was started again")
        found: dict[str, dict[int, float]] = {_USAGE: {}, _QUERIES: {}, _HITS: {}}
        for one in samples(text, *found):
            if (rank := whole(one.labels.get("engine", "0"))) is not None:
                found[one.name][rank] = one.value
        total = self._facts.total_blocks
        if not total:
            return {}
        return {
            rank: self._snapshot(rank, usage, total, found[_QUERIES].get(rank), found[_HITS].get(rank))
            for rank, usage in found[_USAGE].items()
        }

    def _snapshot(
        self, rank: int, usage: float, total: int, queries: float | None, hits: float | None
    ) -> ComponentSnapshot:
        usage = min(max(usage, 0.0), 1.0)
        used = round(usage * total)
        rate = None if queries is None or hits is None else self._hit_rate(rank, queries, hits)
        return ComponentSnapshot(used, total, usage, rate, rank, active_decode_blocks=used)

    def _hit_rate(self, rank: int, queries: float, hits: float) -> float | None:
        before = self._counted.get(rank, (0.0, 0.0))
        self._counted[rank] = queries, hits
        looked_up, found = queries - before[0], hits - before[1]
        return min(found / looked_up, 1.0) if looked_up > 0 and found >= 0 else None


def load_stat(payload: bytes, dp_rank: int, block_size_tokens: int) -> ComponentSnapshot:
    """Return the load in an SGLang server's message. Raise InvalidMessage for one of another form.

    An array: the name, running requests, waiting requests, tokens in use, tokens of the cache (0: unknown), rank; then,
    in newer servers, the uncached tokens of waiting requests, and more.
    """
    try:
        plain = from_msgpack(payload, list[Any])
    except InvalidArgument as error:
        raise InvalidMessage(f"not a load: {error}") from error
    used, total = _count(plain, 3), _count(plain, 4)
    if plain[:1] != ["LoadStat"] or used is None or total is None:
        raise InvalidMessage("a load is ['LoadStat', running, waiting, tokens in use, tokens of the cache, rank, ...]")
    blocks = -(-used // block_size_tokens)
    usage = min(used / total, 1.0) if total else 0.0
    return ComponentSnapshot(
        blocks,
        total // block_size_tokens,
        usage,
        dp_rank=dp_rank,
        active_decode_blocks=blocks,
        active_prefill_tokens=_count(plain, 6),
    )


def _count(plain: list[Any], place: int) -> int | None:
    value = plain[place] if place < len(plain) else None
    return value if type(value) is int and value >= 0 else None


class LoadFeed:
    """Publishes the load of a server's ranks, from when the worker gives it the publisher.

    The load comes from the sockets of the ranks where the facts name them, else from pages of metrics, which `read`
    reads; without `read` the server shows none.
    """

    def __init__(self, facts: ServerFacts, read: ReadLoad | None = None) -> None:
        self.malformed = 0
        """Messages and pages that were none, or could not be fetched."""
        self._facts, self._read = facts, read
        self._block_size_tokens = facts.block_size_tokens or 1
        self._publisher: SnapshotPublisher | None = None
        self._is_ready = anyio.Event()

    def bindings(self) -> MetricsBindings:
        """Return what the engine returns from `setup_metrics`."""
        if not self._facts.load_sources and self._read is None:
            return MetricsBindings()
        return MetricsBindings(dp_ranks=list(self._facts.ranks), on_publisher_ready=self._attach)

    async def run(self, client: Client, headers: Mapping[str, str], every_s: float) -> None:
        """Publish until cancelled: what the sockets send, as it comes, or a page of metrics every `every_s`.

        A page that cannot be had is left out, and so is a message that is none. Raise EngineShutdown if a page shows
        that the server was started again, InvalidArgument without pyzmq and for an endpoint that is none.
        """
        await self._is_ready.wait()
        async with anyio.create_task_group() as tasks:
            for dp_rank, endpoint in self._facts.load_sources.items():
                tasks.start_soon(self._follow, dp_rank, endpoint)
            while not self._facts.load_sources and self._read is not None:
                try:
                    self._publish(self._read(await _metrics(client, headers)))
                except EngineShutdown:
                    raise
                except PenstockError as error:
                    self._note(f"the metrics of {client.address} are not there: {error}")
                await anyio.sleep(every_s)

    async def _follow(self, dp_rank: int, endpoint: str) -> None:
        with EventSockets.opened(endpoint, topic=b"", message_bytes=_STAT_BYTES) as sockets:
            while True:
                item = await sockets.receive()
                if item is Link.CUT:
                    self._note(f"a message of the load from {endpoint} is too large, or none")
                    sockets.reconnect()
                elif isinstance(item, list):
                    self._receive(dp_rank, item)

    def _receive(self, dp_rank: int, frames: list[bytes]) -> None:
        try:
            if len(frames) != 3:
                raise InvalidMessage("a message of the load has a topic, a sequence and a payload")
            self._publish({dp_rank: load_stat(frames[2], dp_rank, self._block_size_tokens)})
        except InvalidMessage as error:
            self._note(f"the load of rank {dp_rank} cannot be read: {error}")

    def _publish(self, snapshots: Mapping[int, ComponentSnapshot]) -> None:
        if self._publisher is not None:
            for rank, snapshot in snapshots.items():
                self._publisher.publish(rank, snapshot)

    def _attach(self, publisher: SnapshotPublisher) -> None:
        self._publisher = publisher
        self._is_ready.set()

    def _note(self, text: str) -> None:
        self.malformed += 1
        if self.malformed <= _WARNINGS:
            _log.warning("%s", text)


async def _metrics(client: Client, headers: Mapping[str, str]) -> str:
    """Return the page of metrics. Raise the error of the connection, or of a status other than 200."""
    status, body = await fetched(client, "GET", METRICS, headers, within_s=_POLL_S)
    if status != 200:
        raise of_status(status, body)
    return body.decode("utf-8", "replace")
