"""Streams: the messages that a server stores, in the terms of this package. Another door of nats-py.

A call ends as `BrokerSession.call` around it does, and with Unavailable if it is not answered in `call_timeout_s`:
servers without a leader answer nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import anyio
import nats.errors
import nats.js.errors
from attrs import frozen
from nats.js import JetStreamContext, api

from pipeline import Unavailable

from .broker_messages import Delivered, Messages

TTL_HEADER, EXPECTED_HEADER = "Nats-TTL", "Nats-Expected-Last-Subject-Sequence"
_WRONG_SEQUENCE = {10071, 10164}
"""Error codes of JetStream: the subject was written in between."""
_NAME_IN_USE = 10058
"""Error code of JetStream: a stream of that name has other settings."""


@frozen
class Stored:
    """The last message of a subject in a stream."""

    data: bytes
    headers: Mapping[str, str]
    sequence: int


class Streams:
    """See the module. Those of one client."""

    def __init__(self, messages: Messages, api_of_client: JetStreamContext) -> None:
        self._messages, self._api = messages, api_of_client

    @contextmanager
    def _answered(self) -> Iterator[None]:
        timeout_s = self._messages.options.call_timeout_s
        with anyio.move_on_after(timeout_s) as scope:
            yield
        if scope.cancelled_caught:
            raise Unavailable(f"{self._messages.address} has not answered within {timeout_s:g} s")

    async def account(self) -> bool:
        """Return whether the server has JetStream for this login. Raise its error if it cannot answer now."""
        try:
            await self._api.account_info()
        except nats.js.errors.ServiceUnavailableError as error:
            if error.code is not None:  # a cluster without a leader; without a code nobody has answered
                raise
            return False
        return True

    async def ensure_stream(self, config: Mapping[str, Any]) -> None:
        """Create the stream, or keep the one of that name. Raise Unavailable if it lacks a setting that is a flag."""
        wanted = api.StreamConfig(**config)
        assert wanted.name is not None
        try:
            with self._answered():
                await self._api.add_stream(wanted)
        except nats.js.errors.BadRequestError as error:
            if error.err_code != _NAME_IN_USE:
                raise
            with self._answered():
                found = (await self._api.stream_info(wanted.name)).config
            lacking = [name for name, value in config.items() if value is True and getattr(found, name) is not True]
            if lacking:
                raise Unavailable(
                    f"the stream {wanted.name} of {self._messages.address} lacks {', '.join(lacking)}"
                ) from None

    async def store(
        self, subject: str, data: bytes, headers: dict[str, str], *, expected: int | None = None
    ) -> int | None:
        """Append the message to its stream. Return its sequence number.

        None, and nothing is written, if the subject's last message is not the one of number `expected` (0: no message).
        """
        if expected is not None:
            headers = headers | {EXPECTED_HEADER: str(expected)}
        try:
            with self._answered():
                return (await self._api.publish(subject, data, headers=headers)).seq
        except nats.js.errors.APIError as error:
            if error.err_code in _WRONG_SEQUENCE:
                return None
            raise

    async def store_all(self, batch: list[tuple[str, bytes, dict[str, str], int]]) -> list[int | None]:
        """Do `store` for each (subject, data, headers, expected), at a third of the cost of single calls.

        None also for one that the server refused or did not answer. nats-py's own way never returns if one is refused.
        """
        inbox, results, answered = self._messages.new_inbox(), dict[int, int | None](), anyio.Event()

        def receive(message: Delivered) -> None:
            number = int(message.subject.rpartition(".")[2])
            results[number] = _sequence_in(message.data)
            if len(results) == len(batch):
                answered.set()

        end = await self._messages.subscribe(f"{inbox}.*", receive, messages=len(batch) + 1, size_bytes=0)
        try:
            for number, (subject, data, headers, expected) in enumerate(batch):
                headers = headers | {EXPECTED_HEADER: str(expected)}
                await self._messages.publish(subject, data, reply=f"{inbox}.{number}", headers=headers)
            with anyio.move_on_after(self._messages.options.call_timeout_s):
                await answered.wait()
        finally:
            await end()
        return [results.get(number) for number in range(len(batch))]

    async def last(self, stream: str, subject: str) -> Stored | None:
        """Return the subject's last message in the stream, None if there is none."""
        try:
            with self._answered():
                found = await self._api.get_msg(stream, subject=subject)
        except nats.js.errors.NotFoundError:
            return None
        return Stored(found.data or b"", found.headers or {}, found.seq or 0)

    async def consume(self, stream: str, name: str, inbox: str, subjects: list[str], *, latest: bool) -> int:
        """Let the stream deliver what it has of the subjects, then what comes, to the inbox. Return how much it has.

        `latest`: only the last message of each subject at first. The server forgets this when it is not read any more.
        """
        config = api.ConsumerConfig(
            name=name,
            deliver_subject=inbox,
            filter_subjects=subjects,
            deliver_policy=api.DeliverPolicy.LAST_PER_SUBJECT if latest else api.DeliverPolicy.ALL,
            ack_policy=api.AckPolicy.NONE,
            max_deliver=1,
            idle_heartbeat=self._messages.options.heartbeat_s,
            inactive_threshold=max(5.0, 2 * self._messages.options.lost_after_s),
            num_replicas=1,
            mem_storage=True,
        )
        with self._answered():
            return (await self._api.add_consumer(stream, config)).num_pending or 0

    async def forget(self, stream: str, name: str) -> None:
        """End what `consume` began; the server does so too after a while."""
        with suppress(nats.errors.Error), self._answered():
            await self._api.delete_consumer(stream, name)

    async def after(self, stream: str, subject: str, sequence: int) -> Stored | None:
        """Return the subject's first message in the stream from that number on, None if there is none."""
        try:
            with self._answered():
                found = await self._api.get_msg(stream, seq=sequence, subject=subject, next=True, direct=True)
        except nats.js.errors.NotFoundError:
            return None
        return Stored(found.data or b"", found.headers or {}, found.seq or 0)

    async def purge(self, stream: str, subject: str) -> None:
        """Remove all messages of the subject from the stream."""
        with self._answered():
            await self._api.purge_stream(stream, subject=subject)


def _sequence_in(answer: bytes) -> int | None:
    """Return the number in a stream's answer to a message, None if it holds an error or is none."""
    try:
        found = json.loads(answer)
        return None if "error" in found else int(found["seq"])  # an error comes with the number 0
    except (ValueError, LookupError, TypeError):
        return None
