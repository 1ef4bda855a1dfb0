"""SharedListener: connections of a socket that several processes share."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from serving.listeners import listen
from serving.socket import PortShares, SharedListener
from serving.socket.shared_listener import waiting_connections

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how many connections wait"),
]

TURNS = 20


@pytest.fixture(params=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 0) as opened:
        opened.setblocking(False)
        yield opened


class Process:
    """A process behind the port, as far as the others see it."""

    def __init__(self, listener: socket.socket, shares: PortShares | None) -> None:
        self.transports: list[asyncio.BaseTransport] = []
        self.taking = SharedListener(listener, self._protocol, count=lambda: len(self.transports), shares=shares)

    def _protocol(self) -> asyncio.Protocol:
        transports = self.transports

        class Kept(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                transports.append(transport)

        return Kept()

    async def end(self) -> None:
        self.taking.close()
        await self.taking.wait_closed()
        for each in self.transports:
            each.close()


async def taken_in_turns(processes: list[Process]) -> list[int]:
    """Return the connections of each process after a few turns of the loop."""
    for _ in range(TURNS):
        await asyncio.sleep(0)
    taken = [len(each.transports) for each in processes]
    for each in processes:
        await each.end()
    return taken


def connect(listener: socket.socket, count: int, opened: ExitStack) -> None:
    for _ in range(count):
        opened.enter_context(socket.create_connection(listener.getsockname()))


async def test_many_connections_that_wait_are_taken_in_few_turns_and_shared_out(
    listener: socket.socket, tmp_path: Path
) -> None:
    """The last of 256 connections waited for 128 turns of the loop, seconds for a process with much to do."""
    PortShares.make(path := tmp_path / "shares", 2)
    with listener.dup() as another, ExitStack() as opened:
        connect(listener, 256, opened)
        processes = [Process(each, PortShares(path, number)) for number, each in enumerate((listener, another))]
        assert await taken_in_turns(processes) == [128, 128]


async def test_a_process_alone_takes_all_that_wait(listener: socket.socket, tmp_path: Path) -> None:
    PortShares.make(path := tmp_path / "shares", 1)
    with ExitStack() as opened:
        connect(listener, 100, opened)
        assert await taken_in_turns([Process(listener, PortShares(path, 0))]) == [100]


async def test_one_that_knows_nothing_of_others_leaves_most_of_each_turn_to_them(listener: socket.socket) -> None:
    with listener.dup() as another, ExitStack() as opened:
        connect(listener, 40, opened)
        taken = await taken_in_turns([Process(listener, None), Process(another, None)])
    assert sum(taken) == 40
    assert min(taken) >= 15


async def test_connections_that_wait_are_counted(listener: socket.socket, tmp_path: Path) -> None:
    with ExitStack() as opened:
        connect(listener, 3, opened)
        assert waiting_connections(listener) == 3
        opened.enter_context(listener.accept()[0])
        assert waiting_connections(listener) == 2
        local = opened.enter_context(socket.socket(socket.AF_UNIX))
        local.bind(str(tmp_path / "s"))
        local.listen()
        assert waiting_connections(local) == 1
