"""What a process publishes: its publishers in the store, and a queue for each process that reads a channel of it.

publish, in any thread ──► numbered in the loop ──► local subscribers
                                               └──► one queue a reader: bounded, the oldest dropped ──► its stream
publish_soon ──► due, until a reader's next item is made ──► published as above
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from random import Random
from threading import RLock
from typing import Any
from weakref import finalize

import anyio

from pipeline import Context, StreamClosed, function_engine
from pipeline.errors import CodecError
from pipeline.loop import LoopHandle, Timer, Wakeup, clock
from pipeline.rx import AnyIOScheduler
from pipeline.wire import to_json, to_msgpack

from ..discovery import Store
from ..events import Event, Publisher
from ..names import MAX_ID, Instance
from ..requests import RequestPlane, Serving
from .channels import (
    SERVED_AT,
    Channel,
    ChannelRecord,
    ChannelRequest,
    DirectEventLimits,
    EventBatch,
    EventRun,
    PublisherState,
    channel_key,
)
from .incoming import SubscribedChannels

_log = logging.getLogger(__name__)


class ReaderQueue:
    """The events that wait for one reader of a channel. For one loop and one reading task.

    `publish_due` is called before an item is made: it publishes, here and elsewhere, what was left until then.
    """

    def __init__(
        self,
        publishers: list[PublisherState],
        limits: DirectEventLimits,
        publish_due: Callable[[], object] = lambda: None,
    ) -> None:
        self._limits, self._publish_due = limits, publish_due
        self._first: list[PublisherState] | None = publishers
        self._events: deque[tuple[bytes, int, int, int]] = deque()
        """The payload of each, its publisher, its number and its date in milliseconds."""
        self._dropped: dict[int, int] = {}
        """Of publishers whose events were dropped: the number behind the last of these."""
        self._news, self._gathered, self._clock = Wakeup(), Timer(), clock()
        self._is_closed = False
        self.size_bytes = 0
        """Bytes that wait."""

    def __len__(self) -> int:
        return len(self._events)

    def push(self, payload: bytes, publisher_id: int, sequence: int, at_ms: int) -> None:
        """Append an event; drop the oldest ones while there are too many."""
        events, limits = self._events, self._limits
        events.append((payload, publisher_id, sequence, at_ms))
        if len(events) >= limits.batch_events:
            self._gathered.wake()
        self.size_bytes += len(payload)
        while len(events) > limits.events or (self.size_bytes > limits.size_bytes and len(events) > 1):
            oldest, dropped_id, number, _ = events.popleft()
            self.size_bytes -= len(oldest)
            self._dropped[dropped_id] = number + 1
        self._news.wake()

    def wake(self) -> None:
        """Have the reader's next item made: an event is due."""
        self._news.wake()

    def close(self) -> None:
        """End the stream after what waits."""
        self._is_closed = True
        self._news.wake()
        self._gathered.wake()

    async def batches(self, context: Context[Any]) -> AsyncGenerator[EventBatch, None]:
        """Yield the publishers' states, then events as they come, until the queue is closed or the request stopped.

        An event that comes alone is yielded at once; after an item others gather for `limits.gather_s`.
        Where events were dropped, the next item has the states of their publishers: these may publish nothing more.
        """
        forget = context.control.on_stop(self.close)
        try:
            if self._first is not None:
                states, self._first = self._first, None
                yield EventBatch(states)
            while True:
                while self._has_events():
                    yield self._next_batch()
                if self._is_closed:
                    return
                next_s = self._clock() + self._limits.gather_s
                await self._news.wait()
                if self._clock() < next_s and len(self._events) < self._limits.batch_events and not self._is_closed:
                    await self._gathered.wait_until(next_s)
        finally:
            forget()

    def _has_events(self) -> bool:
        self._publish_due()
        return bool(self._events)

    def _next_batch(self) -> EventBatch:
        events, dropped, self._dropped = self._events, self._dropped, {}
        runs: list[EventRun] = []
        run: EventRun | None = None
        for _ in range(min(len(events), self._limits.batch_events)):
            payload, publisher_id, sequence, at_ms = events.popleft()
            self.size_bytes -= len(payload)
            if run is None or publisher_id != run.publisher_id or sequence != run.sequence + len(run.payloads):
                run = EventRun(publisher_id, sequence, [], [])
                runs.append(run)
            run.published_at_ms.append(at_ms)
            run.payloads.append(payload)
        return EventBatch([PublisherState(*state) for state in dropped.items()], runs)


class PublishedChannels:
    """See the module. Used in the loop it was opened in. `local` has the subscribers of this process."""

    def __init__(
        self,
        store: Store,
        scheduler: AnyIOScheduler,
        limits: DirectEventLimits,
        local: SubscribedChannels,
        wall_ms: Callable[[], int],
        rng: Random,
    ) -> None:
        self.server: Instance | None = None
        """Where this process serves its channels; None before it is open."""
        self._store, self._scheduler, self._limits = store, scheduler, limits
        self._local, self._wall_ms, self._rng = local, wall_ms, rng
        self._handle: LoopHandle | None = None
        self._serving: Serving | None = None
        self._publishers: dict[Channel, dict[int, int]] = {}
        """The next number of each publisher."""
        self._readers: dict[Channel, list[ReaderQueue]] = {}
        self._due: dict[Channel, dict[int, Callable[[], object]]] = {}
        """What makes the next event of each publisher that has one due; only of channels with a reader."""
        self._is_closed = False

    @property
    def readers(self) -> int:
        """Number of streams to other processes."""
        return sum(map(len, self._readers.values()))

    @property
    def publishers(self) -> int:
        """Number of publishers."""
        return sum(map(len, self._publishers.values()))

    async def open(self, requests: RequestPlane) -> None:
        """Serve the channels. Raise as `RequestPlane.serve`."""
        self._handle = LoopHandle()
        wanted = Instance.of(SERVED_AT, self._rng.randint(1, MAX_ID))
        self.server, self._serving = await requests.serve(wanted, function_engine(self._read))

    def publisher(self, channel: Channel) -> Publisher:
        """Return a new publisher, which is removed when the object is dropped.

        Raise StreamClosed before `open`, and InvalidArgument for names without a key.
        """
        handle, server = self._handle, self.server
        if handle is None or server is None:
            raise StreamClosed("this event plane is not open")
        publisher_id = self._rng.randint(1, MAX_ID)
        key = channel_key(channel, publisher_id)
        publisher = _DirectPublisher(self, handle, channel, publisher_id, self._limits.events)
        if not self._is_closed:
            self._publishers.setdefault(channel, {})[publisher_id] = 0
            value = to_json(ChannelRecord(*channel, publisher_id, server))
            self._scheduler.spawn(partial(self._register, channel, publisher_id, key, value))
            dropped = finalize(publisher, handle.run_soon, lambda: self._drop(channel, publisher_id))
            dropped.atexit = False
        return publisher

    def publish(self, channel: Channel, publisher_id: int, payload: object, skipped: int) -> None:
        """Number the payload, after `skipped` numbers, and deliver it. Raise CodecError if it has no MessagePack form
        and another process reads the channel."""
        if channel in self._due:
            self._publish_due(channel, publisher_id)
        numbers = self._publishers.get(channel, {})
        if (sequence := numbers.get(publisher_id)) is None:
            return
        sequence += skipped
        numbers[publisher_id] = sequence + 1
        at_ms = self._wall_ms()
        try:
            if readers := self._readers.get(channel):
                data = to_msgpack(payload)
                for reader in readers:
                    reader.push(data, publisher_id, sequence, at_ms)
        finally:
            if self._local.takes(channel, publisher_id):
                event = Event(publisher_id, sequence, at_ms, channel[1], payload)
                self._local.deliver(channel, event, skipped > 0)

    def publish_soon(self, channel: Channel, publisher_id: int, make: Callable[[], object]) -> bool:
        """Publish an event with the next item of a reader; number it and return False if there is no subscriber.

        A process that reads the channel later begins with the next number, and so has missed this one.
        """
        if self._local.takes(channel, publisher_id):
            self.publish(channel, publisher_id, make(), 0)
            return True
        if channel not in self._readers or self._handle is None:
            self._skip_number(channel, publisher_id)
            return False
        self._publish_due(channel, publisher_id)
        self._due.setdefault(channel, {})[publisher_id] = make
        self._handle.run(partial(self._wake_readers, channel))
        return True

    async def close(self) -> None:
        """Remove the publishers from the store and end the streams. What fails is logged: it lapses by itself."""
        self._is_closed = True
        for channel in list(self._due):
            self._publish_all_due(channel)
        keys = [channel_key(channel, one) for channel, numbers in self._publishers.items() for one in numbers]
        self._publishers.clear()
        for readers in self._readers.values():
            for reader in readers:
                reader.close()
        try:
            with anyio.move_on_after(self._limits.close_s, shield=True):
                async with anyio.create_task_group() as tasks:
                    for key in keys:
                        tasks.start_soon(self._remove, key)
        finally:
            if self._serving is not None:
                self._serving.cut()

    # -- inside

    async def _read(self, request: ChannelRequest, context: Context[ChannelRequest]) -> AsyncIterator[EventBatch]:
        channel = (request.scope, request.topic)
        numbers = self._publishers.get(channel, {})
        states = [PublisherState(*state) for state in numbers.items()]
        queue = ReaderQueue(states, self._limits, partial(self._publish_all_due, channel))
        self._readers.setdefault(channel, []).append(queue)
        try:
            async with aclosing(queue.batches(context)) as batches:
                async for batch in batches:
                    yield batch
        finally:
            self._publish_all_due(channel)  # it may have been the only reader
            self._readers[channel].remove(queue)
            if not self._readers[channel]:
                del self._readers[channel]

    def _wake_readers(self, channel: Channel) -> None:
        for reader in self._readers.get(channel, ()):
            reader.wake()

    def _publish_all_due(self, channel: Channel) -> None:
        if channel in self._due:
            for publisher_id in list(self._due[channel]):
                self._publish_due(channel, publisher_id)

    def _publish_due(self, channel: Channel, publisher_id: int) -> None:
        """Publish the publisher's event that is due, if one is. One that cannot be made or sent shows as missed."""
        if (due := self._due.get(channel)) is None or (make := due.pop(publisher_id, None)) is None:
            return
        if not due:
            del self._due[channel]
        next_sequence = self._publishers.get(channel, {}).get(publisher_id)
        try:
            self.publish(channel, publisher_id, make(), 0)
        except Exception:
            _log.warning("an event of %s is lost", channel[1], exc_info=True)
            if next_sequence == self._publishers.get(channel, {}).get(publisher_id):
                self._skip_number(channel, publisher_id)

    def _skip_number(self, channel: Channel, publisher_id: int) -> None:
        if publisher_id in (numbers := self._publishers.get(channel, {})):
            numbers[publisher_id] += 1

    def _is_live(self, channel: Channel, publisher_id: int) -> bool:
        return publisher_id in self._publishers.get(channel, {})

    def _drop(self, channel: Channel, publisher_id: int) -> None:
        """Forget a publisher that was dropped."""
        if not self._is_live(channel, publisher_id):
            return
        del self._publishers[channel][publisher_id]
        if not self._publishers[channel]:
            del self._publishers[channel]
        try:
            self._scheduler.spawn(lambda scope: self._remove(channel_key(channel, publisher_id), scope))
        except StreamClosed:  # the runtime was left, and its keys with it
            _log.debug("a publisher was dropped after its runtime")

    async def _register(
        self, channel: Channel, publisher_id: int, key: str, value: bytes, scope: anyio.CancelScope
    ) -> None:
        """Write the publisher's record, as often as it takes; if the publisher is dropped meanwhile, there is none."""
        delay_s, level = self._limits.first_delay_s, logging.WARNING
        with scope:
            while self._is_live(channel, publisher_id):
                try:
                    await self._store.create(key, value)
                    break
                except Exception as error:
                    _log.log(level, "%s is not registered, tried again in %g s: %s", key, delay_s, error)
                    level = logging.DEBUG
                await anyio.sleep(delay_s)
                delay_s = min(2 * delay_s, self._limits.longest_delay_s)
            if not self._is_live(channel, publisher_id):
                await self._remove(key)

    async def _remove(self, key: str, scope: anyio.CancelScope | None = None) -> None:
        with scope or anyio.CancelScope():
            try:
                await self._store.delete(key)
            except Exception as error:
                _log.info("%s is not removed and will lapse: %s", key, error)


class _DirectPublisher(Publisher):
    def __init__(
        self, channels: PublishedChannels, handle: LoopHandle, channel: Channel, publisher_id: int, limit: int
    ) -> None:
        self.publisher_id = publisher_id
        self._channels, self._handle, self._channel, self._limit = channels, handle, channel, limit
        self._lock = RLock()  # a signal handler may publish, too
        self._waiting: deque[object] = deque()
        self._skipped = 0
        self._is_scheduled = False

    def publish(self, payload: object) -> None:
        with self._lock:
            self._waiting.append(payload)
            if len(self._waiting) > self._limit:  # other threads publish faster than the loop delivers
                self._waiting.popleft()
                self._skipped += 1
            if self._is_scheduled:
                return
            self._is_scheduled = True
        self._handle.run(self._deliver)

    def publish_soon(self, make: Callable[[], object]) -> bool:
        with self._lock:
            is_next = self._handle.is_here and not self._is_scheduled
        if is_next:
            return self._channels.publish_soon(self._channel, self.publisher_id, make)
        self.publish(make())
        return True

    def _deliver(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
            skipped, self._skipped, self._is_scheduled = self._skipped, 0, False
        problem: CodecError | None = None
        for payload in waiting:
            try:
                self._channels.publish(self._channel, self.publisher_id, payload, skipped)
            except CodecError as error:  # the others are delivered
                problem = error
            skipped = 0
        if problem is not None:
            raise problem
