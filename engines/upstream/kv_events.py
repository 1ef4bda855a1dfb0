"""KV events of a server's ranks, followed and published as those of the worker in front of it.

    PUB, ROUTER socket of a rank ──► KvEventFollower ──change, tier──► KvEventPublisher of the rank ──► routers

KvEventFeeds: the followers of all ranks of one server, from when the worker gives them their publishers.

Source: dynamo components/src/dynamo/vllm/publisher.py and lib/llm/src/kv_router/publisher/zmq_listener.rs. Other than
there, what was missed is fetched by a replay.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import anyio

from pipeline.llm.kv_events import EngineChange, EngineFollower, ReplayLimits, WireLimits
from pipeline.loop import clock
from pipeline.protocols.kv import KvEventData, StorageTier

from ..publishing import KvEventPublisher, PushSource
from .facts import EventSource, ServerFacts

_log = logging.getLogger(__name__)

SILENT_AFTER_S = 30.0
"""Default of the time that answers may fill blocks without any event of them."""

Publish = Callable[[KvEventData, StorageTier], object]
"""Publishes a change of one rank's cache, and its tier."""


class KvEventFollower(EngineFollower):
    """Follows the events of one rank in `run` and calls `publish` with each change; see `EngineFollower`.

    The changes are those of `dp_rank`, whatever rank the server names in them: a server that was given one rank of many
    counts its own from 0. `note_answer` notices a rank that publishes nothing although it has answered prompts.
    """

    def __init__(
        self,
        source: EventSource,
        *,
        dp_rank: int,
        block_size_tokens: int,
        publish: Publish,
        limits: WireLimits | None = None,
        replay_limits: ReplayLimits | None = None,
        silent_after_s: float = SILENT_AFTER_S,
    ) -> None:
        super().__init__(
            source.endpoint,
            self._published,
            block_size_tokens=block_size_tokens,
            replay_endpoint=source.replay_endpoint,
            topic=source.topic.encode(),
            limits=limits,
            replay_limits=replay_limits,
        )
        self.source, self.dp_rank = source, dp_rank
        self.is_silent = False
        """Whether it was warned that no event comes; False again once one does."""
        self._publish, self._block_size_tokens = publish, block_size_tokens
        self._silent_after_s, self._clock = silent_after_s, clock()
        self._first_answer_s: float | None = None

    def note_answer(self, tokens: int) -> None:
        """Note that the rank has answered a prompt of so many tokens.

        Log a warning, once, if none of its messages has come `silent_after_s` after the first that filled a block.
        """
        if self.has_received:
            self.is_silent, self._first_answer_s = False, None
        elif tokens >= self._block_size_tokens and not self.is_silent:
            now_s = self._clock()
            self._first_answer_s = now_s if self._first_answer_s is None else self._first_answer_s
            if now_s - self._first_answer_s >= self._silent_after_s:
                self.is_silent = True
                text = "rank %d answers prompts, but no KV event has come from %s: is it reachable, and the topic %r?"
                _log.warning(text, self.dp_rank, self.endpoint, self.source.topic)

    def _published(self, change: EngineChange) -> None:
        self._publish(change.change, change.storage_tier)


class KvEventFeeds:
    """See the module. `followers` has those of the ranks whose publisher was given, by rank.

    Without a block size the events would have no meaning: nothing is followed then.
    """

    def __init__(self, facts: ServerFacts, *, replay_limits: ReplayLimits | None = None) -> None:
        self.followers: dict[int, KvEventFollower] = {}
        self._sources: Mapping[int, EventSource] = facts.event_sources if facts.block_size_tokens else {}
        self._block_size_tokens = facts.block_size_tokens or 1
        self._replay_limits = replay_limits
        self._begun: set[int] = set()
        self._changed = anyio.Event()

    def sources(self) -> Sequence[PushSource]:
        """Return what the engine returns from `kv_event_sources`."""
        return [PushSource(self._attach, dp_rank) for dp_rank in sorted(self._sources)]

    def note_answer(self, dp_rank: int | None, tokens: int) -> None:
        """Note that a prompt was answered, by that rank; None: an unknown one, which counts for a server of one."""
        if dp_rank is None and len(self.followers) == 1:
            dp_rank = next(iter(self.followers))
        if dp_rank is not None and (follower := self.followers.get(dp_rank)) is not None:
            follower.note_answer(tokens)

    def metrics_text(self) -> str:
        """Return what happened to the events of each rank, as Prometheus text; empty while none is followed."""
        lines: list[str] = []
        for name, kind, description, values in _METRICS if self.followers else ():
            lines += [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]
            for rank, follower in sorted(self.followers.items()):
                found = values(follower)
                counts = found if isinstance(found, Mapping) else {"": found}
                for reason, count in sorted(counts.items()):
                    reasoned = f',reason="{reason}"' if reason else ""
                    lines.append(f'{name}{{dp_rank="{rank}"{reasoned}}} {int(count)}')
        return "".join(f"{line}\n" for line in lines)

    async def run(self) -> None:
        """Follow each rank from when its publisher is there, until cancelled.

        Raise InvalidArgument without pyzmq and for an endpoint that is none.
        """
        async with anyio.create_task_group() as tasks:
            while True:
                for dp_rank in self.followers.keys() - self._begun:
                    self._begun.add(dp_rank)
                    tasks.start_soon(self.followers[dp_rank].run)
                await self._changed.wait()
                self._changed = anyio.Event()

    def _attach(self, publisher: KvEventPublisher) -> None:
        rank = publisher.dp_rank
        self.followers[rank] = KvEventFollower(
            self._sources[rank],
            dp_rank=rank,
            block_size_tokens=self._block_size_tokens,
            publish=publisher.publish,
            replay_limits=self._replay_limits,
        )
        self._changed.set()


def _not_applied(follower: KvEventFollower) -> Mapping[str, int]:
    """Return how many events and messages were left out, by reason."""
    counts = Counter[str](follower.filtered)
    counts.update(follower.refused)
    counts.update(malformed=follower.malformed, repeated=follower.repeated)
    return counts


_METRICS: Sequence[tuple[str, str, str, Callable[[KvEventFollower], int | Mapping[str, int]]]] = (
    ("penstock_kv_events_connected", "gauge", "Whether the connection stands", lambda one: one.is_connected),
    ("penstock_kv_events_silent", "gauge", "Whether a rank that answers sends none", lambda one: one.is_silent),
    ("penstock_kv_events_lost_batches_total", "counter", "Batches that did not come", lambda one: one.lost_batches),
    (
        *("penstock_kv_events_replayed_batches_total", "counter", "Batches fetched by a replay"),
        lambda one: one.replayed_batches,
    ),
    ("penstock_kv_events_restarts_total", "counter", "Restarts of a rank that were noticed", lambda one: one.restarts),
    ("penstock_kv_events_refused_total", "counter", "Events and messages that are left out", _not_applied),
)
"""Name, kind, description and value of each metric."""
