"""Leases: the keys that this process holds in a bucket, renewed until they are dropped.

    held ──► every third of the time to live: written again, on condition that it is still the last message
                  ├── it is not: it lapsed, or the store is empty     ──► created again, with its value and revision
                  ├── it was deleted, or another process wrote it     ──► dropped
                  └── it is ours: an answer was lost                  ──► held as it is stored

With a new connection all are renewed at once, so what lapsed while there was none is back as soon as the server is.
"""

from __future__ import annotations

import logging

import anyio
from attrs import define

from pipeline.loop import clock

from .broker_session import BrokerSession
from .kv_bucket import Writer, revision_of, state_of

_log = logging.getLogger(__name__)

_BATCH = 32
"""Renewals sent at once, of some 30 µs of the loop's time each."""
RENEWALS_PER_TTL = 3


@define(eq=False)
class Held:
    """One key: its value, that value's revision, and the number of the message that holds it now."""

    key: str
    value: bytes
    revision: int
    sequence: int


class Leases:
    """See the module."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._held: dict[str, Held] = {}
        self.renewals = 0
        """Keys renewed so far."""

    def __contains__(self, key: str) -> bool:
        return key in self._held

    @property
    def keys(self) -> list[str]:
        """The keys that are renewed."""
        return list(self._held)

    def hold(self, key: str, value: bytes, revision: int) -> None:
        """Renew the key, written with this revision, from now on."""
        self._held[key] = Held(key, value, revision, revision)

    def drop(self, key: str) -> None:
        """Stop renewing the key."""
        self._held.pop(key, None)

    async def renew(self, session: BrokerSession) -> None:
        """Renew all keys, now and then evenly over each interval, until the session is lost."""
        await self._writer.bucket.ensure(session)
        interval_s, now_s = self._writer.ttl_s / RENEWALS_PER_TTL, clock()
        spread_s = 0.0
        while True:
            next_s = now_s() + interval_s
            held = list(self._held.values())
            batches = [held[first : first + _BATCH] for first in range(0, len(held), _BATCH)]
            for batch in batches:
                await self._renew(session, batch)
                await anyio.sleep(spread_s / len(batches))
            spread_s = 0.8 * interval_s
            await anyio.sleep(max(0.0, next_s - now_s()))

    async def _renew(self, session: BrokerSession, batch: list[Held]) -> None:
        writer = self._writer
        current = [held for held in batch if self._held.get(held.key) is held]
        numbers = await session.streams.store_all(
            [(writer.bucket.subject(h.key), h.value, writer.headers(h.key, h.revision), h.sequence) for h in current]
        )
        for held, number in zip(current, numbers, strict=True):
            if number is not None:
                held.sequence = number
                self.renewals += 1
            elif self._held.get(held.key) is held:
                await self._recover(session, held)

    async def _recover(self, session: BrokerSession, held: Held) -> None:
        """Find out why the key could not be renewed."""
        last = await self._writer.last(session, held.key)
        if self._held.get(held.key) is not held:
            return
        state = "lapsed" if last is None else state_of(last)
        if state == "deleted":
            self._give_up(held, "was deleted by another process")
        elif last is None or state == "lapsed":
            await self._create_again(session, held, 0 if last is None else last.sequence)
        elif self._writer.wrote(last):
            held.value, held.revision = last.data, revision_of(last, last.sequence)
            held.sequence = last.sequence
        else:
            self._give_up(held, "is another process's now")

    async def _create_again(self, session: BrokerSession, held: Held, expected: int) -> None:
        writer = self._writer
        subject, headers = writer.bucket.subject(held.key), writer.headers(held.key, held.revision)
        number = await session.streams.store(subject, held.value, headers, expected=expected)
        if number is not None:  # otherwise the next round sees what is there
            held.sequence = number
            self.renewals += 1
            _log.info("%s had lapsed and is registered again", held.key)

    def _give_up(self, held: Held, why: str) -> None:
        _log.warning("%s %s: it is not renewed any more", held.key, why)
        self.drop(held.key)
