"""Handshakes: the TLS handshakes under way on one listener, bounded in number."""

from __future__ import annotations

import logging

import anyio

from ..log_limit import LogLimit

_log = logging.getLogger(__name__)

HANDSHAKES_MAX = 256
"""Handshakes of a listener that may be under way. Each has `connect_timeout_s`."""


class Handshakes:
    """Places for handshakes. Made in a loop. Connections beyond them are not accepted yet: the system keeps them.

    `place` comes before a connection is accepted, `end` once its handshake has ended, however it did.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._free = anyio.Semaphore(HANDSHAKES_MAX)
        self._faults = LogLimit(_log)

    async def place(self) -> None:
        """Take a place. Wait for one if there is none."""
        if self._free.value == 0:
            self._faults.warning("%s: no more connections are accepted until TLS handshakes have ended", self._where)
        await self._free.acquire()

    def end(self) -> None:
        """Give a place back."""
        self._free.release()
