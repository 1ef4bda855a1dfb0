"""Messages: publish and subscribe of one nats-py client, in the terms of this package."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import anyio
import nats.errors
from attrs import frozen
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from .options import NatsOptions, ServerAddress


@frozen
class Delivered:
    """One message of a subscription."""

    subject: str
    data: bytes
    headers: Mapping[str, str]
    position: Position | None = None
    """If a stream delivered it."""
    is_control: bool = False
    """Whether it is a notice of the server to the reader of a stream, such as a heartbeat."""


@frozen
class Position:
    """Where a message stands in its stream, and in what the reader has been sent."""

    number: int
    """Counted for this reader, from 1."""
    sequence: int
    """The stream's."""
    pending: int
    """Messages that the stream still has for the reader."""


class Messages:
    """See the module. A call ends as `BrokerSession.call` around it does."""

    def __init__(self, client: Client, address: ServerAddress, options: NatsOptions) -> None:
        self.address, self.options = address, options
        self._client = client
        self._dropped: dict[Subscription, Callable[[], None]] = {}

    @property
    def max_payload_bytes(self) -> int:
        """The largest message that this server takes."""
        return self._client.max_payload

    async def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Send a message to the present subscribers of the subject."""
        await self._client.publish(subject, data, reply=reply, headers=headers)

    async def subscribe(
        self,
        subject: str,
        receive: Callable[[Delivered], None],
        *,
        messages: int,
        size_bytes: int,
        dropped: Callable[[], None] = lambda: None,
    ) -> Callable[[], Awaitable[None]]:
        """Call `receive` with each message from now on; return what ends this.

        At most so many messages and bytes wait for it; for each further one `dropped` is called.
        """

        async def received(message: Msg) -> None:
            headers, position = message.headers or {}, _position(message.reply)
            is_control = position is None and not message.data and "Status" in headers
            receive(Delivered(message.subject, message.data, headers, position, is_control))

        subscription: Subscription = await self._client.subscribe(
            subject, cb=received, pending_msgs_limit=messages, pending_bytes_limit=size_bytes
        )

        self._dropped[subscription] = dropped

        async def end() -> None:
            self._dropped.pop(subscription, None)
            with suppress(nats.errors.Error):
                await subscription.unsubscribe()

        return end

    async def round_trip(self) -> None:
        """Wait until the server has taken all that was sent before."""
        inbox, heard = self.new_inbox(), anyio.Event()
        end = await self.subscribe(inbox, lambda _: heard.set(), messages=2, size_bytes=0)
        await self.publish(inbox, b"")
        await heard.wait()
        await end()

    def new_inbox(self) -> str:
        """Return a subject that nothing else uses."""
        return self._client.new_inbox()


def _position(reply: str) -> Position | None:
    """Return what the reply subject of a stream's message holds, None for any other subject."""
    if not reply.startswith("$JS.ACK."):
        return None
    parts = reply.split(".")
    # $JS.ACK.stream.consumer.deliveries.sequence.number.time.pending, newer ones with domain and account before these.
    first = 5 if len(parts) == 9 else 7
    try:
        return Position(number=int(parts[first + 1]), sequence=int(parts[first]), pending=int(parts[first + 3]))
    except (LookupError, ValueError):
        return None
