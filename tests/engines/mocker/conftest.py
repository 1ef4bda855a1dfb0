"""Sockets that read the events of a mock engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from zmq import Context

WAIT_MS = 5000
"""Limit of a reader's wait, in ms; no message takes that long."""


@pytest.fixture
def context() -> Iterator[Context[Any]]:
    """Makes the sockets of one test, and closes them."""
    zmq = pytest.importorskip("zmq")
    with zmq.Context() as context:
        context.linger = 0
        context.rcvtimeo = WAIT_MS
        yield context
