"""Connecting, losing and connecting again."""

from __future__ import annotations

import asyncio
import gc
import logging
import ssl
from contextlib import suppress
from pathlib import Path
from random import Random
from time import monotonic

import anyio
import pytest
from attrs import evolve

from pipeline import CannotConnect, Unavailable
from pipeline.network.nats import NatsConnection, NatsOptions, NatsServer, NatsServerOptions
from pipeline.network.nats.broker_session import BrokerSession
from pipeline.network.nats.options import parse_addresses
from pipeline.rx import AnyIOScheduler
from tests.pipeline.network.nats.worlds import PATIENT, QUICK, NatsWorld, fake_server, open_files, own_server
from tests.pipeline.network.worlds import eventually

SECRET = "hidden-token"


async def refusal(url: str, options: NatsOptions = QUICK) -> str:
    """Return the text of the error that opening a connection raises."""
    async with AnyIOScheduler() as scheduler:
        with pytest.raises(CannotConnect) as refused:
            await NatsConnection(url, scheduler, options).open()
    return str(refused.value)


def info(**fields: object) -> bytes:
    """Return what a server says first."""
    import json

    return (
        b"INFO " + json.dumps({"version": "2.12.0", "max_payload": 1024, "headers": True} | fields).encode() + b"\r\n"
    )


async def test_a_server_that_is_not_there_is_named_within_the_time() -> None:
    begun_s = monotonic()
    text = await refusal("nats://127.0.0.1:1", NatsOptions(connect_timeout_s=0.5))
    assert "nats://127.0.0.1:1" in text
    assert "refused" in text or "Connect call failed" in text
    assert monotonic() - begun_s < 4.0


async def test_a_server_that_comes_while_it_is_waited_for_is_connected_to(tmp_path: Path) -> None:
    async with own_server(tmp_path) as server, AnyIOScheduler() as scheduler:
        await server.kill()
        connection = NatsConnection(server.url, scheduler, evolve(QUICK, connect_timeout_s=30.0))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connection.open)
            await anyio.sleep(0.2)
            await server.start()
        assert connection.is_connected
        await connection.close()


async def test_the_first_of_several_servers_may_be_silent(world: NatsWorld) -> None:
    async with fake_server(lambda _: b"", b"") as (silent, _), AnyIOScheduler() as scheduler:
        connection = NatsConnection([silent, world.url], scheduler, QUICK)
        await connection.open()
        await connection.close()


async def test_a_silent_server_and_one_that_speaks_otherwise_are_refused_in_time() -> None:
    options = NatsOptions(connect_timeout_s=0.1)
    for first in (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"INFO {\r\n", b"x" * 100_000, b"\xff" * 100 + b"\r\n"):
        async with fake_server(lambda _: b"", first) as (url, _):
            begun_s = monotonic()
            assert url in await refusal(url, options)
            assert monotonic() - begun_s < 4.0


@pytest.mark.parametrize("version", ["2.10.99", "1.4.1", "unknown"])
async def test_an_older_server_is_refused_at_once_and_named(version: str) -> None:
    def answer(line: bytes) -> bytes:
        return b"PONG\r\n" if line.startswith(b"PING") else b""

    async with fake_server(answer, info(version=version)) as (url, _):
        text = await refusal(url)
    assert version in text
    assert "2.11" in text


async def test_a_server_without_jetstream_is_refused_at_once(tmp_path: Path) -> None:
    async with own_server(tmp_path, is_stored=False) as server:
        assert "without JetStream" in await refusal(server.url)


async def test_a_wrong_token_is_refused_at_once_and_shown_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with own_server(tmp_path, token="right") as server:
        begun_s = monotonic()
        text = await refusal(server.url, NatsOptions(token=SECRET))
        text += await refusal(server.url.replace("//", f"//{SECRET}@"))
        text += await refusal(server.url.replace("//", f"//me:{SECRET}@"))
        assert monotonic() - begun_s < 4.0
    assert "refuses the login" in text
    assert SECRET not in text + caplog.text
    assert "right" not in str(server) + repr(server)


@pytest.mark.parametrize("where", ["option", "url"])
async def test_the_right_token_is_let_in(tmp_path: Path, where: str) -> None:
    async with own_server(tmp_path, token=SECRET) as server, AnyIOScheduler() as scheduler:
        options = NatsOptions(token=SECRET) if where == "option" else NatsOptions()
        url = server.url if where == "option" else server.url.replace("//", f"//{SECRET}@")
        connection = NatsConnection(url, scheduler, options)
        await connection.open()
        assert SECRET not in f"{connection} {connection!r}"
        await connection.close()


async def test_a_login_is_never_sent_in_the_clear_where_tls_is_ordered() -> None:
    for scheme, tls in (("tls", None), ("nats", ssl.create_default_context())):
        async with fake_server(lambda _: b"PONG\r\n", info()) as (url, received):
            text = await refusal(url.replace("nats://", f"{scheme}://"), NatsOptions(token=SECRET, tls=tls))
            assert "offers no TLS" in text
            assert SECRET.encode() not in b"".join(received)


async def test_a_second_user_shares_the_connection_and_the_last_one_ends_it(world: NatsWorld) -> None:
    async with AnyIOScheduler() as scheduler:
        connection = NatsConnection(world.url, scheduler, QUICK)
        await connection.close()
        await connection.open()
        await connection.open()
        assert connection.sessions == 1
        await connection.close()
        assert connection.is_connected
        await connection.close()
        assert not connection.is_connected
        await connection.close()
        with pytest.raises(Unavailable):
            connection.session_now()
        await connection.open()
        assert connection.is_connected
        await connection.close()


async def test_a_server_that_comes_back_is_found_and_nothing_stays_open(tmp_path: Path) -> None:
    async with own_server(tmp_path) as server, AnyIOScheduler() as scheduler:
        connection = NatsConnection(server.url, scheduler, QUICK)
        await connection.open()
        await anyio.sleep(QUICK.heartbeat_s)
        tasks, files = len(asyncio.all_tasks()), open_files()
        for restart in range(1, 6):
            await server.kill()
            await eventually(lambda: not connection.is_connected)
            await server.start()
            await eventually(lambda: connection.sessions == restart + 1 and connection.is_connected)  # noqa: B023
        gc.collect()
        await eventually(lambda: (len(asyncio.all_tasks()), open_files()) == (tasks, files))
        await connection.close()


class Longest(Random):
    """Draws the longest pause, and writes it down."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn_s: list[float] = []

    def uniform(self, a: float, b: float) -> float:
        self.drawn_s.append(b)
        return b


async def test_a_server_that_drops_each_connection_is_asked_ever_later(
    world: NatsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost_at_once(session: BrokerSession) -> None:
        session.lose("dropped")

    pauses_s = [0.05, 0.1, 0.2, 0.4, 0.8]
    async with AnyIOScheduler() as scheduler:
        rng = Longest()
        connection = NatsConnection(world.url, scheduler, evolve(QUICK, reconnect_max_s=5.0), rng=rng)
        with monkeypatch.context() as dropping:
            dropping.setattr(BrokerSession, "beat", lost_at_once)
            await connection.open()
            begun_s = monotonic()
            await eventually(lambda: connection.sessions >= 6, within_s=30.0)
            assert monotonic() - begun_s > 0.9 * sum(pauses_s)
        assert rng.drawn_s[:5] == pytest.approx(pauses_s)
        await eventually(lambda: connection.is_connected)
        await connection.close()


async def test_a_call_ends_when_the_server_dies_and_waits_a_bounded_time_for_the_next(tmp_path: Path) -> None:
    async with own_server(tmp_path) as server:
        world = NatsWorld(server.url, tmp_path)
        async with world.store() as store, world.store(PATIENT) as patient:
            await server.kill()
            await eventually(lambda: not (store._connection.is_connected or patient._connection.is_connected))
            begun_s = monotonic()
            with pytest.raises(Unavailable):
                await store.get("a/k")
            assert QUICK.call_timeout_s - 0.1 < monotonic() - begun_s < QUICK.call_timeout_s + 2.5
            begun_s = monotonic()
            with pytest.raises(Unavailable):
                await patient.delete("a/k")
            assert monotonic() - begun_s < 4.0
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(patient.create, "a/k", b"1")
                await anyio.sleep(0.1)
                await server.start()
            assert await patient.entries() == {"a/k": b"1"}


async def test_a_call_to_a_suspended_server_ends(tmp_path: Path) -> None:
    async with own_server(tmp_path) as server, NatsWorld(server.url, tmp_path).store(PATIENT) as store:
        server.pause()
        begun_s = monotonic()
        with pytest.raises(Unavailable):
            await store.create("a/k", b"1")
        assert monotonic() - begun_s < PATIENT.lost_after_s + PATIENT.heartbeat_s + 4.0
        await eventually(lambda: not store._connection.is_connected)
        server.resume()
        await eventually(lambda: store._connection.is_connected)
        assert await store.get("a/other") is None


async def test_a_suspended_server_does_not_keep_a_process_from_closing(tmp_path: Path) -> None:
    async with own_server(tmp_path) as server:
        async with NatsWorld(server.url, tmp_path).store(PATIENT) as store:
            await store.create("a/k", b"1")
            server.pause()
            begun_s = monotonic()
        assert monotonic() - begun_s < 8.0
        server.resume()


async def test_a_lost_connection_is_cut_at_once_whatever_waits_to_be_written(tmp_path: Path) -> None:
    async with own_server(tmp_path) as server, AnyIOScheduler() as scheduler:
        connection = NatsConnection(server.url, scheduler, QUICK)
        await connection.open()
        session = connection.session_now()
        server.pause()
        async with anyio.create_task_group() as tasks:
            for _ in range(100):
                tasks.start_soon(flood, session)
            await anyio.sleep(0.1)
            session.lose("cut")
        begun_s = monotonic()
        await eventually(lambda: session._client.is_closed and session._closed.is_set())
        assert monotonic() - begun_s < 2.5
        server.resume()
        await eventually(lambda: connection.is_connected)
        await connection.close()


async def flood(session: BrokerSession) -> None:
    """Send more than a server that does not read takes."""
    with suppress(Unavailable), session.call():
        await session.publish("flood", bytes(500_000))


async def test_an_attempt_that_is_cancelled_leaves_nothing_open() -> None:
    gc.collect()
    tasks, files = len(asyncio.all_tasks()), open_files()
    async with AnyIOScheduler() as scheduler:
        async with fake_server(lambda _: b"", b"") as (url, _):
            connection = NatsConnection(url, scheduler, QUICK)
            with anyio.move_on_after(0.1):
                await connection.open()
        assert not connection.is_connected
    await eventually(lambda: (len(asyncio.all_tasks()), open_files()) == (tasks, files))


class TestOnTrio:
    @pytest.fixture
    def anyio_backend(self) -> str:
        return "trio"

    async def test_trio_is_refused_with_the_reason(self, world: NatsWorld) -> None:
        assert "nats-py, runs on asyncio only" in await refusal(world.url)

    async def test_a_server_process_runs_on_trio(self, tmp_path: Path) -> None:
        async with NatsServer(tmp_path, NatsServerOptions()) as server:
            assert server.port
            await server.kill()


def test_the_end_of_a_session_whose_server_was_killed_is_complete_on_uvloop(tmp_path: Path) -> None:
    """Closing wrote what was pending to the lost connection, which raises there, and left tasks behind."""

    async def run() -> None:
        async with own_server(tmp_path) as server:
            session = BrokerSession(parse_addresses(server.url)[0], QUICK, lambda: None)
            await session.connect(5.0)
            await session.subscribe("somewhere", lambda _: None, messages=1, size_bytes=1)
            session._transport.abort()
            await anyio.sleep(0.01)
            session._transport.write(b"PING\r\n")
            session._transport.writelines([b"PING\r\n"])
            await session.end()
            assert not [task for task in asyncio.all_tasks() if "_wait_for_msgs" in repr(task.get_coro())]

    anyio.run(run, backend_options={"use_uvloop": True})
