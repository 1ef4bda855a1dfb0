"""Files are checked one after the other, for as long as the server runs."""

from __future__ import annotations

from typing import Any

import anyio

from serving.access import follow


class Watched:
    """Counts its checks; each takes `takes_s`."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.takes_s = takes_s
        self.checks = 0
        self.open = 0

    async def check(self) -> None:
        self.checks += 1
        self.open += 1
        assert self.open == 1
        try:
            await anyio.sleep(self.takes_s)
        finally:
            self.open -= 1


async def test_each_is_checked_every_two_seconds_until_the_server_ends() -> None:
    watched: list[Any] = [Watched(), Watched()]
    with anyio.move_on_after(9):
        await follow(watched)
    assert [each.checks for each in watched] == [4, 4]


async def test_a_slow_check_is_not_overtaken_and_ends_with_the_server() -> None:
    slow: Any = Watched(takes_s=100)
    with anyio.move_on_after(150):
        await follow([slow])
    assert (slow.checks, slow.open) == (2, 0)


async def test_without_files_there_is_nothing_to_follow() -> None:
    with anyio.fail_after(1):
        await follow([])
