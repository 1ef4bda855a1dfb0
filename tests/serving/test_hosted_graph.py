"""Several workers behind one graph: how they start and end together."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import anyio
import pytest

from engines import EchoEngine, EngineConfig, ShutdownTimes, SystemHealth, WorkerState
from pipeline import AsyncEngine, Context, Disconnected, PenstockError, Unavailable
from pipeline.errors import BackendUnknown
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage
from pipeline.testing import OpenStreams
from serving.deployment import GraphConfig, HostOptions, hosted_graph

TIMES = ShutdownTimes(grace_s=2.0, timeout_s=10.0)


class Team:
    """Engines made one after the other; each generates a letter a second, unless its number is to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.members: list[Member] = []
        self.fails_at_start: dict[int, Exception] = {}
        """The error of `start`, by the engine's number."""
        self.fails_after_s: dict[int, float] = {}
        """Seconds until the background task fails, by the engine's number."""
        self.start_s = self.drain_s = 0.0
        """Seconds that each engine takes to start and to drain."""
        module = ModuleType("team_of_engines")
        vars(module)["join"] = lambda: Member(self)
        monkeypatch.setitem(sys.modules, "team_of_engines", module)

    def config(self, workers: int) -> GraphConfig:
        """The config of a graph over so many of these engines, without migration."""
        return GraphConfig(engine="team_of_engines:join", workers=workers, migration_limit=0)

    @property
    def calls(self) -> list[list[str]]:
        """What was called on each engine, in order."""
        return [member.calls for member in self.members]


class Member(EchoEngine):
    """An engine of a team, which records its calls."""

    def __init__(self, team: Team) -> None:
        super().__init__(delay_s=1.0)
        self.team, self.number = team, len(team.members)
        self.calls: list[str] = []
        team.members.append(self)

    async def start(self, worker_id: int) -> EngineConfig:
        self.calls.append("start")
        await anyio.sleep(self.team.start_s)
        if (error := self.team.fails_at_start.get(self.number)) is not None:
            raise error
        return await super().start(worker_id)

    async def background(self) -> None:
        if (after_s := self.team.fails_after_s.get(self.number)) is not None:
            await anyio.sleep(after_s)
            raise LookupError(f"number {self.number} broke")

    async def drain(self) -> None:
        self.calls.append("drain")
        await anyio.sleep(self.team.drain_s)

    async def cleanup(self) -> None:
        self.calls.append("cleanup")


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Team:
    return Team(monkeypatch)


def chat(text: str) -> Context[Any]:
    return Context(ChatCompletionRequest(model="echo", messages=[ChatMessage(role="user", content=text)]))


class Client:
    """Sends chats, and records how each of them ended."""

    def __init__(self) -> None:
        self.endings: dict[str, float | type[PenstockError]] = {}
        """By the chat's text: the seconds until its answer ended, or the type of the error that it ended with."""

    async def send(self, graph: AsyncEngine[Any, Any], text: str) -> None:
        """Send a chat and read its answer to the end."""
        began_s = anyio.current_time()
        try:
            async with await graph.generate(chat(text)) as stream:
                async for _ in stream:
                    pass
            self.endings[text] = round(anyio.current_time() - began_s, 3)
        except PenstockError as error:
            self.endings[text] = type(error)


@pytest.fixture
def client() -> Client:
    return Client()


WHOLE = ["start", "drain", "cleanup"]


def test_the_times_are_the_environments_without_a_grace_period() -> None:
    environment = {"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "7", "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "3"}
    assert HostOptions(environment).times == ShutdownTimes(grace_s=0, timeout_s=7)
    assert HostOptions().times == ShutdownTimes(grace_s=0)
    assert HostOptions(environment, times=TIMES).times is TIMES


async def test_many_workers_cost_one_grace_period_and_one_drain(team: Team) -> None:
    team.drain_s = 3
    async with hosted_graph(team.config(4), HostOptions(times=TIMES)) as opened:
        began_s = anyio.current_time()
    assert anyio.current_time() - began_s == pytest.approx(2 + 3)
    assert team.calls == [WHOLE] * 4
    assert {worker.state for worker in opened.workers} == {WorkerState.STOPPED}


async def test_leaving_lets_streams_finish_in_the_runtimes_time_and_takes_nothing_new(
    team: Team, client: Client, open_streams: OpenStreams
) -> None:
    """Five seconds from here; only then the others are cut."""
    async with anyio.create_task_group() as tasks:
        async with hosted_graph(team.config(2), HostOptions()) as opened:
            for text in ("ab", "abcde", "abcdefgh"):
                tasks.start_soon(client.send, opened.graph, text)
            await anyio.sleep(0.5)

            async def ask_late() -> None:
                await anyio.sleep(1)
                await client.send(opened.graph, "z")

            tasks.start_soon(ask_late)
            left_s = anyio.current_time()
        assert anyio.current_time() - left_s == pytest.approx(5)
    assert client.endings == {"ab": 2, "abcde": 5, "abcdefgh": Disconnected, "z": Unavailable}
    assert team.calls == [WHOLE] * 2


async def test_a_worker_that_cannot_start_ends_those_before_it_and_is_raised_as_it_is(team: Team) -> None:
    team.fails_at_start = {2: BackendUnknown("no such device")}
    health = SystemHealth()
    with pytest.raises(BackendUnknown, match="no such device"):
        async with hosted_graph(team.config(4), HostOptions(health=health, times=TIMES)):
            raise AssertionError("entered")
    assert team.calls == [WHOLE, WHOLE, ["start", "cleanup"], []]
    assert anyio.current_time() == pytest.approx(0), "no worker was ever registered"
    assert health.endpoints == {}


async def test_a_worker_that_breaks_while_others_start_is_raised(team: Team) -> None:
    team.start_s, team.fails_after_s = 3, {0: 1.0}
    with anyio.fail_after(99), pytest.raises(BackendUnknown, match="number 0 broke"):
        async with hosted_graph(team.config(3), HostOptions(times=TIMES)):
            raise AssertionError("entered")
    assert team.calls == [WHOLE] * 3


async def test_a_start_that_is_cancelled_ends_all(team: Team) -> None:
    team.start_s = 3
    with anyio.move_on_after(4):
        async with hosted_graph(team.config(3), HostOptions(times=TIMES)):
            raise AssertionError("entered")
    assert team.calls == [WHOLE, ["start", "cleanup"], []]
    assert anyio.current_time() == pytest.approx(4)


async def test_a_block_that_fails_or_is_cancelled_ends_all_at_once_without_grace(team: Team) -> None:
    team.drain_s = 1
    with pytest.raises(LookupError, match="mine"):
        async with hosted_graph(team.config(3), HostOptions(times=TIMES)):
            raise LookupError("mine")
    assert anyio.current_time() == pytest.approx(1)
    with anyio.move_on_after(1):
        async with hosted_graph(team.config(3), HostOptions(times=TIMES)):
            await anyio.sleep_forever()
    assert anyio.current_time() == pytest.approx(1 + 1 + 1)
    assert team.calls == [WHOLE] * 6


async def test_an_error_that_is_being_handled_around_it_is_not_its_own(team: Team) -> None:
    try:
        raise LookupError
    except LookupError:
        async with hosted_graph(team.config(1), HostOptions(times=TIMES)):
            pass
    assert anyio.current_time() == pytest.approx(2), "an orderly end with its grace period"


async def test_a_worker_that_breaks_leaves_the_others_and_the_last_one_gives_the_reason(
    team: Team, client: Client
) -> None:
    team.fails_after_s = {0: 2.5, 1: 6.0}
    async with hosted_graph(team.config(2), HostOptions()) as opened, anyio.create_task_group() as tasks:
        for text in ("abcde", "ABCDE"):
            tasks.start_soon(client.send, opened.graph, text)
        await anyio.sleep(5.5)
        assert sorted(client.endings.values(), key=str) == [5, Disconnected]
        assert opened.failure is None
        tasks.start_soon(client.send, opened.graph, "a")
        await anyio.sleep(1)
        assert client.endings["a"] is Disconnected
        assert str(opened.failure) == "number 0 broke"
        await client.send(opened.graph, "b")
        assert client.endings["b"] is Unavailable
