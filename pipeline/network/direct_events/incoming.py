"""What a process subscribes to: the publishers of a channel by the store, and one stream to each of their processes.

records of a channel ──► a stream to each process ──► events, in order and none twice ──► subscribers, by their type
                            └── broken: opened again, later and later          └── a gap ──► missed
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from random import Random
from typing import Any, TypeAlias, TypeVar

import anyio
from attrs import define, evolve, field

from pipeline import Context, InvalidArgument
from pipeline.errors import InvalidMessage
from pipeline.rx import AnyIOScheduler, CompositeDisposable, Disposable, DisposableBase, Observable, ObserverBase
from pipeline.wire import from_json, record_reader

from ..discovery import Change, Gone, Put, Store
from ..events import Event, Fanout, Missed, Publisher, Sequences
from ..names import Instance
from ..requests import RequestPlane
from .channels import Channel, ChannelRecord, ChannelRequest, DirectEventLimits, EventBatch, EventRun, channel_prefix

T = TypeVar("T")

_Kind: TypeAlias = tuple[Any, int | None]
"""Of subscribers: the type of their payload, and the publisher that is left out."""

_log = logging.getLogger(__name__)


class SubscribedChannels:
    """See the module. Used in one loop. `own_server` returns the instance of this process, whose events come directly.

    A channel is followed while it has a subscriber.
    """

    def __init__(
        self,
        store: Store,
        requests: RequestPlane,
        scheduler: AnyIOScheduler,
        limits: DirectEventLimits,
        rng: Random,
        own_server: Callable[[], Instance | None],
    ) -> None:
        self._store, self._requests, self._scheduler = store, requests, scheduler
        self._limits, self._rng, self._own_server = limits, rng, own_server
        self._followed: dict[Channel, _Followed] = {}
        self._missed: dict[Channel, Fanout[Missed]] = {}
        self._is_closed = False

    @property
    def subscriptions(self) -> int:
        """Number of subscribers to events."""
        return sum(len(followed) for followed in self._followed.values())

    @property
    def streams(self) -> int:
        """Number of streams to other processes, those included that are broken and will be opened again."""
        return sum(followed.streams for followed in self._followed.values())

    def subscribe(self, channel: Channel, payload_type: type[T], but: Publisher | None = None) -> Observable[Event[T]]:
        """Return the channel's events from the subscription on, as `EventPlane.subscribe` does.

        Raise InvalidArgument for names without a key.
        """
        channel_prefix(channel)
        kind: _Kind = (payload_type, None if but is None else but.publisher_id)

        def tidy() -> None:
            followed = self._followed.get(channel)
            if followed is not None and not followed.tidy():
                del self._followed[channel]
                followed.close()

        def subscribe(observer: ObserverBase[Event[T]], _: Any = None) -> DisposableBase:
            if self._is_closed:
                observer.on_completed()
                return Disposable()
            if (followed := self._followed.get(channel)) is None:
                followed = self._followed[channel] = _Followed(self, channel)
                listening = followed.add(observer, kind)
                followed.open()
            else:
                listening = followed.add(observer, kind)
            return CompositeDisposable(listening, Disposable(tidy))

        return Observable(subscribe)

    def missed(self, channel: Channel) -> Observable[Missed]:
        """Return when events of the channel may be lost; see `EventPlane.missed`."""

        def tidy() -> None:
            if channel in self._missed and not self._missed[channel]:
                del self._missed[channel]

        def subscribe(observer: ObserverBase[Missed], _: Any = None) -> DisposableBase:
            if self._is_closed:
                observer.on_completed()
                return Disposable()
            listening = self._missed.setdefault(channel, Fanout()).add(observer)
            return CompositeDisposable(listening, Disposable(tidy))

        return Observable(subscribe)

    def takes(self, channel: Channel, publisher_id: int) -> bool:
        """Return whether this process has a subscriber for events of the publisher, which is one of its own."""
        followed = self._followed.get(channel)
        return followed is not None and followed.takes(publisher_id)

    def deliver(self, channel: Channel, event: Event[Any], is_gap: bool) -> None:
        """Deliver an event of a publisher of this process; `is_gap` if events before it were dropped."""
        if (followed := self._followed.get(channel)) is not None:
            if is_gap:
                self.report(channel, event.publisher_id)
            followed.deliver(event)

    def close(self) -> None:
        """Complete all subscriptions and end all streams."""
        self._is_closed = True
        followed, self._followed = self._followed, {}
        missed, self._missed = self._missed, {}
        for one in followed.values():
            one.close()
        for fanout in missed.values():
            fanout.complete()

    # -- for what is followed

    def report(self, channel: Channel, publisher_id: int) -> None:
        """Report that events of a publisher may be lost."""
        if (fanout := self._missed.get(channel)) is not None:
            fanout.push(Missed(publisher_id))

    def watch(self, channel: Channel) -> Observable[Change]:
        """Return the changes of the channel's records."""
        return self._store.watch(channel_prefix(channel))

    def is_own(self, server: Instance) -> bool:
        """Whether it is this process."""
        own = self._own_server()
        return own is not None and own.key == server.key

    def connect(self, channel: Channel, server: Instance, take: Callable[[EventBatch], None]) -> DisposableBase:
        """Read the channel's stream from the process until disposed, and open it again whenever it ends."""
        return self._scheduler.spawn(lambda scope: self._read(channel, server, take, scope))

    async def _read(
        self, channel: Channel, server: Instance, take: Callable[[EventBatch], None], scope: anyio.CancelScope
    ) -> None:
        delay_s, level = self._limits.first_delay_s, logging.INFO
        with scope:
            while True:
                ending, begun_s = "it ended", math.inf
                try:
                    engine = self._requests.engine(server, EventBatch)
                    async with await engine.generate(Context(ChannelRequest(*channel))) as stream:
                        begun_s = anyio.current_time()
                        async for batch in stream:
                            take(batch)
                except Exception as error:
                    ending = str(error)
                if anyio.current_time() - begun_s >= self._limits.longest_delay_s:  # not one that breaks each time
                    delay_s, level = self._limits.first_delay_s, logging.INFO
                await anyio.sleep(delay_s * self._rng.uniform(0.5, 1.0))
                _log.log(level, "opening the stream of %s from %s again: %s", channel[1], server, ending)
                level = logging.DEBUG
                delay_s = min(2 * delay_s, self._limits.longest_delay_s)


class _Followed:
    """One channel with its subscribers, and the processes that publish there."""

    def __init__(self, owner: SubscribedChannels, channel: Channel) -> None:
        self._owner, self._channel = owner, channel
        self._fanouts: dict[_Kind, Fanout[Event[Any]]] = {}
        self._remotes: dict[str, _Remote] = {}
        """By the key of the process's instance."""
        self._watch: DisposableBase = Disposable()

    def __len__(self) -> int:
        return sum(map(len, self._fanouts.values()))

    @property
    def streams(self) -> int:
        return len(self._remotes)

    def open(self) -> None:
        """Follow the records of the channel."""
        changes = self._owner.watch(self._channel)
        self._watch = changes.subscribe(self._on_change, on_error=self._on_watch_error)

    def add(self, observer: ObserverBase[Event[T]], kind: _Kind) -> DisposableBase:
        return self._fanouts.setdefault(kind, Fanout()).add(observer)

    def tidy(self) -> int:
        """Forget kinds without subscribers; return the number of subscribers."""
        self._fanouts = {kind: fanout for kind, fanout in self._fanouts.items() if fanout}
        return len(self)

    def takes(self, publisher_id: int) -> bool:
        """Return whether a subscriber is there for events of this publisher."""
        return any(left_out != publisher_id for _, left_out in self._fanouts)

    def deliver(self, event: Event[Any]) -> None:
        """Deliver an event with its payload as it is."""
        for (_, left_out), fanout in list(self._fanouts.items()):
            if left_out != event.publisher_id:
                fanout.push(event)

    def close(self) -> None:
        """Complete the subscribers, and read nothing more."""
        self._watch.dispose()
        remotes, self._remotes = self._remotes, {}
        for remote in remotes.values():
            remote.stream.dispose()
        for fanout in self._fanouts.values():
            fanout.complete()

    # -- inside

    def _on_watch_error(self, error: Exception) -> None:
        _log.error("publishers of %s are not followed any more: %s", self._channel[1], error)

    def _on_change(self, change: Change) -> None:
        if isinstance(change, Gone):
            self._remove(change.key)
            return
        try:
            record = from_json(change.value, ChannelRecord)
        except InvalidArgument as error:
            _log.warning("passing over %s: %s", change.key, error)
            return
        if not self._owner.is_own(record.server):
            self._add(change, record)

    def _add(self, change: Put, record: ChannelRecord) -> None:
        server, remote = record.server, self._remotes.get(record.server.key)
        if remote is None or remote.server != server:
            if remote is not None:  # it has another address
                remote.stream.dispose()
            kept = _Remote(server) if remote is None else evolve(remote, server=server)
            self._remotes[server.key] = remote = kept
            kept.stream = self._owner.connect(self._channel, server, lambda batch: self._take(kept, batch))
        remote.publishers[change.key] = record.publisher_id

    def _remove(self, key: str) -> None:
        for server_key, remote in list(self._remotes.items()):
            if (publisher_id := remote.publishers.pop(key, None)) is None:
                continue
            remote.sequences.forget(publisher_id)
            if not remote.publishers:
                remote.stream.dispose()
                del self._remotes[server_key]

    def _take(self, remote: _Remote, batch: EventBatch) -> None:
        for state in batch.publishers:
            if remote.sequences.skip_to(state.publisher_id, state.next_sequence):
                self._owner.report(self._channel, state.publisher_id)
        for run in batch.runs:
            if len(run.payloads) == len(run.published_at_ms):
                self._take_run(remote, run)
            else:
                self._pass_over(remote, run.publisher_id, InvalidMessage("an event has one date"))

    def _take_run(self, remote: _Remote, run: EventRun) -> None:
        publisher_id, topic = run.publisher_id, self._channel[1]
        takers = [
            (record_reader(payload_type), fanout)
            for (payload_type, left_out), fanout in self._fanouts.items()
            if left_out != publisher_id
        ]
        for sequence, (at_ms, data) in enumerate(zip(run.published_at_ms, run.payloads, strict=True), run.sequence):
            sight = remote.sequences.take(publisher_id, sequence)
            if sight == "repeated":
                continue
            if sight == "gap":
                self._owner.report(self._channel, publisher_id)
            for read, fanout in takers:
                try:
                    if not isinstance(data, bytes):
                        raise InvalidMessage("an event is bytes")
                    payload = read(data)
                except (InvalidArgument, InvalidMessage) as error:
                    self._pass_over(remote, publisher_id, error)
                else:
                    fanout.push(Event(publisher_id, sequence, at_ms, topic, payload))

    def _pass_over(self, remote: _Remote, publisher_id: int, error: Exception) -> None:
        """Report events that cannot be read as missed; log it, as a warning only once for each process."""
        self._owner.report(self._channel, publisher_id)
        level, remote.has_warned = logging.DEBUG if remote.has_warned else logging.WARNING, True
        _log.log(level, "passing over an event of %s from %s: %s", self._channel[1], remote.server, error)


@define(eq=False)
class _Remote:
    """Another process that publishes in the channel."""

    server: Instance
    publishers: dict[str, int] = field(factory=dict)
    """Its publishers by the keys of their records."""
    sequences: Sequences = field(factory=Sequences)
    stream: DisposableBase = field(factory=Disposable)
    has_warned: bool = False
    """Whether it has sent what cannot be read."""
