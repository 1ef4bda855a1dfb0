"""ServerFacts: what a server has, found out when it is taken into service, and where its events and load come from."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, field, frozen

from ..llm import EngineConfig

_ANY_HOST = ("*", "0.0.0.0", "[::]", "::")
"""Hosts in an endpoint that stand for every address of the server."""


def reachable(endpoint: str, host: str) -> str:
    """Return a ZMQ endpoint with the server's own host in place of one that means every address."""
    scheme, found, rest = endpoint.partition("://")
    place, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not found or place not in _ANY_HOST:
        return endpoint
    return f"{scheme}://{f'[{host}]' if ':' in host else host}{colon}{port}"


@frozen
class EventSource:
    """Where the KV events of one rank are published."""

    endpoint: str
    """ZMQ endpoint of the PUB socket, such as `tcp://gpu-1:5557`."""
    replay_endpoint: str | None = None
    """ZMQ endpoint of the ROUTER socket that sends past events again; None: there is none."""
    topic: str = ""
    """Topic of the events, a prefix; empty: every one."""

    def at(self, host: str) -> EventSource:
        """Return the source with the server's own host in place of one that means every address."""
        replay = None if self.replay_endpoint is None else reachable(self.replay_endpoint, host)
        return evolve(self, endpoint=reachable(self.endpoint, host), replay_endpoint=replay)


@frozen(kw_only=True)
class ServerFacts:
    """What one server has. None: the server does not show it, never zero."""

    model: str
    """Name of its model in requests."""
    aliases: tuple[str, ...] = ()
    """Further names of the same model."""
    adapters: tuple[str, ...] = ()
    """Names of its LoRA adapters."""
    root: str | None = None
    """Path or hub name that the model was loaded from."""
    version: str | None = None
    """Version of the server."""
    context_length: int | None = None
    """Most tokens of a prompt and its answer."""
    block_size_tokens: int | None = None
    """Tokens of a KV block."""
    total_blocks: int | None = None
    """KV blocks of one rank."""
    max_num_seqs: int | None = None
    """Most requests that run at the same time on one rank."""
    data_parallel_start_rank: int = 0
    """Number of its first rank."""
    data_parallel_size: int = 1
    """Number of its data-parallel ranks."""
    event_sources: Mapping[int, EventSource] = field(factory=dict)
    """Where the KV events of each rank come from; empty: it publishes none."""
    load_sources: Mapping[int, str] = field(factory=dict)
    """ZMQ endpoint of each rank's load; empty: it is read from the metrics."""
    bootstrap_host: str | None = None
    """Host at which decode servers meet this prefill server, for servers with such a handshake."""
    bootstrap_port: int | None = None
    """Port of that handshake."""
    incarnation: str | None = None
    """What changes when the server is started again, such as the time of its start; None: it shows nothing of it."""

    @property
    def ranks(self) -> range:
        """Numbers of its data-parallel ranks."""
        return range(self.data_parallel_start_rank, self.data_parallel_start_rank + self.data_parallel_size)

    def config(self) -> EngineConfig:
        """Return what the engine of this server advertises."""
        return EngineConfig(
            model=self.model,
            model_aliases=list(self.aliases),
            context_length=self.context_length,
            kv_cache_block_size=self.block_size_tokens,
            total_kv_blocks=self.total_blocks,
            max_num_seqs=self.max_num_seqs,
            data_parallel_size=self.data_parallel_size,
            data_parallel_start_rank=self.data_parallel_start_rank,
            bootstrap_host=self.bootstrap_host,
            bootstrap_port=self.bootstrap_port,
            publishes_kv_events=None if self.event_sources else False,
        )
