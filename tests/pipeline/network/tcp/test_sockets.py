"""The request plane over real sockets of this machine: TCP, unix, TLS; asyncio, uvloop and trio."""

from __future__ import annotations

import asyncio
import gc
import resource
import socket
import ssl
import stat
import tempfile
import warnings
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trustme
from attrs import evolve, frozen

from pipeline import AsyncEngine, CannotConnect, Context, Disconnected, InvalidArgument
from pipeline.network.names import EndpointId, Instance
from pipeline.network.tcp import TcpOptions, TcpRequestPlane, framing, handshakes
from pipeline.rx import AnyIOScheduler
from pipeline.testing import OpenStreams, ScriptedEngine, Stall, check_engine
from tests.pipeline.network.tcp.worlds import RawPeer, frame, hello, proof
from tests.pipeline.network.worlds import WHERE, eventually

LOOPS: dict[str, tuple[str, dict[str, Any]]] = {
    "asyncio": ("asyncio", {}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}


@pytest.fixture(params=LOOPS)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """In real time: sockets know no other."""
    return LOOPS[request.param]


KIND: Any = Any
TCP = TcpOptions(has_unix_socket=False)


@frozen
class Planes:
    worker: TcpRequestPlane
    caller: TcpRequestPlane

    async def serve(self, engine: AsyncEngine[Any, Any]) -> tuple[Any, AsyncEngine[Any, Any]]:
        """Serve the engine; return it as it is served, and as it is called."""
        instance, serving = await self.worker.serve(Instance.of(EndpointId.parse(WHERE), 1), engine)
        return serving, self.caller.engine(instance, KIND)


@asynccontextmanager
async def planes(worker: TcpOptions, caller: TcpOptions | None = None) -> AsyncIterator[Planes]:
    async with AnyIOScheduler() as scheduler:
        made = Planes(TcpRequestPlane(scheduler, worker), TcpRequestPlane(scheduler, caller or worker))
        await made.worker.open()
        await made.caller.open()
        yield made
        await made.caller.close()
        await made.worker.close()


async def answer(engine: AsyncEngine[Any, Any], payload: Any = None) -> list[Any]:
    return await (await engine.generate(Context(payload))).collect()


@pytest.mark.parametrize("options", [TCP, TcpOptions()], ids=["tcp", "unix"])
async def test_calls_cross_and_a_worker_that_is_gone_is_noticed(options: TcpOptions) -> None:
    local = ScriptedEngine(lambda payload: [len(payload), Stall()] if payload == "stalls" else [len(payload), 2])
    async with planes(options) as both:
        serving, engine = await both.serve(local)
        assert await answer(engine, "a" * 3_000_000) == [3_000_000, 2]
        async with await engine.generate(Context("stalls")) as stream:
            assert await stream.__anext__() == 6
            await both.worker.close()
            with pytest.raises(Disconnected):
                await stream.__anext__()
        with pytest.raises(CannotConnect, match="cannot connect to"):
            await answer(engine, "x")
        await eventually(lambda: local.open == serving.running == 0)


@pytest.mark.parametrize("options", [TCP, TcpOptions()], ids=["tcp", "unix"])
async def test_an_engine_behind_a_socket_holds_the_contract(options: TcpOptions) -> None:
    held: list[Any] = []

    @asynccontextmanager
    async def remote() -> AsyncIterator[AsyncEngine[Any, Any]]:
        async with planes(evolve(options, window_items=8)) as both:
            serving, engine = await both.serve(ScriptedEngine(range(64)))
            held[:] = [serving]
            await answer(engine)  # the connection, whose tasks stay, is there
            yield engine

    await check_engine(
        remote, request="good", expected=list(range(64)), open_count=lambda _: held[0].running,
        settle_s=10.0, within_s=20.0,  # what does not end, stands still for ever
        rules=("E1", "E3", "E4", "E5", "E7", "E9", "E10", "E12"),
    )  # fmt: skip


async def test_the_unix_socket_is_private_and_goes_with_its_plane() -> None:
    async with planes(TcpOptions()) as both:
        path = Path(both.worker.transport["unix"])
        assert _is_private(path)
        assert both.worker.transport["host"] == both.caller.transport["host"]
    assert not _exists(path.parent)


def _is_private(path: Path) -> bool:
    return stat.S_ISSOCK(path.stat().st_mode) and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def _exists(path: Path) -> bool:
    return path.exists()


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("has_tls", [False, True])
async def test_a_connection_that_is_accepted_while_the_plane_closes_is_left_open_by_nobody(
    turns: int, has_tls: bool, tmp_path: Path
) -> None:
    """What is left open is a ResourceWarning once it is collected, and those fail the tests."""
    options = tls(files(tmp_path, "worker.test", trustme.CA())) if has_tls else TCP
    async with AnyIOScheduler() as scheduler:
        plane = TcpRequestPlane(scheduler, options)
        await plane.open()
        host, _, port = plane.transport["tcp"].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5) as caller:
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            await plane.close()
            caller.settimeout(5)
            with suppress(ConnectionResetError):
                while await anyio.to_thread.run_sync(caller.recv, 1000):
                    pass  # a Hello may have been sent before
        gc.collect()


def run_until_cancelled(loop: str, turns: int, options: TcpOptions) -> None:
    """Run a plane to which callers connect, and cancel everything after so many turns of the loop."""

    async def main() -> None:
        with ExitStack() as callers, anyio.CancelScope() as scope:
            async with AnyIOScheduler() as scheduler:
                plane = TcpRequestPlane(scheduler, options)
                await plane.open()
                host, _, port = plane.transport["tcp"].rpartition(":")
                for turn in range(turns + 1):
                    if turn in (0, 6):  # before the listener waits, and while it does
                        for _ in range(3):
                            callers.enter_context(socket.create_connection((host, int(port)), timeout=5))
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
                if loop != "trio":
                    for task in asyncio.all_tasks():
                        task.cancel()  # as asyncio.run does at its end
                await plane.close()

    backend, backend_options = LOOPS[loop]
    with suppress(asyncio.CancelledError):
        anyio.run(main, backend=backend, backend_options=backend_options)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_connection_that_is_accepted_as_all_tasks_are_cancelled_is_closed(loop: str, tmp_path: Path) -> None:
    """A task of asyncio that is cancelled before it has begun never runs: what it was given is closed without it."""
    options = tls(files(tmp_path, "worker.test", trustme.CA()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for turns in range(16):
            run_until_cancelled(loop, turns, options)
            gc.collect()
    assert [str(one.message) for one in caught if "raddr=" in str(one.message)] == []


async def test_without_a_place_for_a_unix_socket_there_is_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deep = tmp_path / ("deep" * 30)
    _make(deep)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    async with planes(TcpOptions()) as both:
        assert set(both.worker.transport) == {"tcp", "process"}
        assert "no unix socket" in caplog.text
        assert await answer((await both.serve(ScriptedEngine([1])))[1]) == [1]


def _make(folder: Path) -> None:
    folder.mkdir()


async def test_a_path_that_is_gone_leaves_the_address() -> None:
    async with planes(TcpOptions()) as both:
        _, engine = await both.serve(ScriptedEngine([1]))
        await anyio.Path(both.worker.transport["unix"]).unlink()
        assert await answer(engine) == [1]


async def test_a_port_that_is_taken_is_named() -> None:
    async with planes(TCP) as both, AnyIOScheduler() as scheduler:
        port = int(both.worker.transport["tcp"].rpartition(":")[2])
        with pytest.raises(CannotConnect, match=f"cannot listen on 127.0.0.1:{port}"):
            await TcpRequestPlane(scheduler, evolve(TCP, port=port)).open()


@pytest.mark.parametrize(
    ("anyio_backend", "has_tls"),
    [(LOOPS["trio"], False), (LOOPS["trio"], True), (LOOPS["asyncio"], True)],
    ids=["trio", "trio-tls", "asyncio-tls"],
)
async def test_without_a_free_file_descriptor_callers_wait(
    caplog: pytest.LogCaptureFixture,
    anyio_backend: tuple[str, dict[str, Any]],
    has_tls: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On asyncio without TLS it is the loop that waits."""
    monkeypatch.setattr(handshakes, "HANDSHAKES_MAX", 2)  # what cannot be accepted takes no place
    options = tls(files(tmp_path, "worker.test", trustme.CA())) if has_tls else TCP
    async with planes(options) as both:
        _, engine = await both.serve(ScriptedEngine([1]))
        port = int(both.worker.transport["tcp"].rpartition(":")[2])
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as caller:
            caller.setblocking(False)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            try:
                caller.connect_ex(("127.0.0.1", port))
                await eventually(lambda: "cannot be accepted" in caplog.text)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert "Too many open files" in caplog.text
            assert await answer(engine) == [1]


async def test_what_is_announced_may_be_another_name() -> None:
    async with planes(evolve(TCP, announced_host="localhost"), TCP) as both:
        assert both.worker.transport["tcp"].startswith("localhost:")
        assert await answer((await both.serve(ScriptedEngine([1])))[1]) == [1]


# -- TLS


@frozen
class Files:
    cert: Path
    key: Path
    ca: Path


def files(folder: Path, name: str, authority: trustme.CA) -> Files:
    """Write a certificate for the name, its key and its authority."""
    folder = folder / name
    folder.mkdir()
    found = Files(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    issued = authority.issue_cert(name)
    issued.private_key_pem.write_to_path(str(found.key))
    for part in issued.cert_chain_pems:
        part.write_to_path(str(found.cert), append=True)
    authority.cert_pem.write_to_path(str(found.ca))
    return found


def tls(made: Files, *, mutual: bool = True) -> TcpOptions:
    return evolve(TCP, tls_cert_path=made.cert, tls_key_path=made.key, tls_ca_path=made.ca if mutual else None)


async def test_certificates_of_one_authority_connect_under_any_name(tmp_path: Path) -> None:
    authority = trustme.CA()
    one, other = files(tmp_path, "worker.test", authority), files(tmp_path, "caller.test", authority)
    async with planes(tls(one), tls(other)) as both:
        _, engine = await both.serve(ScriptedEngine(lambda payload: [len(payload)]))
        assert await answer(engine, "a" * 1_000_000) == [1_000_000]


async def test_a_caller_of_another_authority_is_not_served(tmp_path: Path) -> None:
    ours, theirs = files(tmp_path, "worker.test", trustme.CA()), files(tmp_path, "caller.test", trustme.CA())
    foreign = evolve(tls(theirs), tls_ca_path=ours.ca)  # it trusts the worker, which does not trust it
    local = ScriptedEngine([1])
    async with planes(tls(ours), foreign) as both:
        _, engine = await both.serve(local)
        with pytest.raises(CannotConnect):
            await answer(engine)
    assert local.requests == []


@pytest.mark.parametrize("worker_has_tls", [True, False])
async def test_a_side_without_tls_gets_no_connection(worker_has_tls: bool, tmp_path: Path) -> None:
    secure = evolve(tls(files(tmp_path, "worker.test", trustme.CA())), connect_timeout_s=0.5)
    plain = evolve(TCP, connect_timeout_s=0.5)
    local = ScriptedEngine([1])
    async with planes(*((secure, plain) if worker_has_tls else (plain, secure))) as both:
        _, engine = await both.serve(local)
        with pytest.raises(CannotConnect):
            await answer(engine)
    assert local.requests == []


async def test_tls_handshakes_under_way_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Callers beyond them wait: those that send nothing lose their places after a while, or when they leave."""
    monkeypatch.setattr(handshakes, "HANDSHAKES_MAX", 2)
    worker = evolve(tls(files(tmp_path, "worker.test", authority := trustme.CA())), connect_timeout_s=1.0)
    caller = evolve(tls(files(tmp_path, "caller.test", authority)), connect_timeout_s=20.0)
    async with planes(worker, caller) as both:
        _, engine = await both.serve(ScriptedEngine([1]))
        port = int(both.worker.transport["tcp"].rpartition(":")[2])
        with ExitStack() as opened:
            for _ in range(2):
                opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            begun_s = anyio.current_time()
            assert await answer(engine) == [1]
            assert anyio.current_time() - begun_s > 0.5
            assert "no more connections are accepted until TLS handshakes have ended" in caplog.text
    async with planes(evolve(worker, connect_timeout_s=20.0), caller) as both:
        _, engine = await both.serve(ScriptedEngine([1]))
        port = int(both.worker.transport["tcp"].rpartition(":")[2])
        for _ in range(4):  # a place for each is free again
            socket.create_connection(("127.0.0.1", port)).close()
        with anyio.fail_after(10):
            assert await answer(engine) == [1]


async def test_without_an_authority_a_caller_checks_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    named, other = files(tmp_path, "localhost", authority), files(tmp_path, "elsewhere.test", authority)
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", lambda self: self.load_verify_locations(named.ca))
    local = ScriptedEngine([1])
    async with planes(evolve(tls(named, mutual=False), announced_host="localhost")) as both:
        assert await answer((await both.serve(local))[1]) == [1]
    async with planes(evolve(tls(other, mutual=False), announced_host="localhost")) as both:
        with pytest.raises(CannotConnect, match="localhost"):
            await answer((await both.serve(local))[1])


@pytest.mark.parametrize("wrong", ["tls_cert_path", "tls_key_path", "tls_ca_path"])
@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN CERTIFICATE-----\nPRIVATE KEY-----\nnone\n"])
async def test_a_file_that_cannot_be_used_is_named(wrong: str, content: bytes | None, tmp_path: Path) -> None:
    made, path = files(tmp_path, "worker.test", trustme.CA()), tmp_path / "wrong.pem"
    if content is not None:
        path.write_bytes(content)
    changed: dict[str, Any] = {wrong: path}
    async with AnyIOScheduler() as scheduler:
        with pytest.raises(InvalidArgument, match=r"wrong\.pem") as caught:
            TcpRequestPlane(scheduler, evolve(tls(made), **changed))
    assert caught.value.field in (wrong, "tls_key_path")


async def test_a_caller_that_reads_nothing_stops_the_engine(open_streams: OpenStreams) -> None:
    local = ScriptedEngine(["a" * 10_000] * 10_000)
    async with planes(TCP) as both:
        await both.serve(local)
        peer = RawPeer()
        host, _, port = both.worker.transport["tcp"].rpartition(":")
        async with await anyio.connect_tcp(host, int(port)) as caller:
            peer.received(await caller.receive())
            await caller.send(hello(window_items=10**6, window_bytes=10**9, message_limit_bytes=10**6))
            await caller.send(proof(peer))
            await caller.send(frame(framing.CALL, 1, {"instance": "ns/comp/ep/1", "id": "r", "payload": None}))
            await eventually(lambda: local.delivered > 100)
            before = -1
            while before < local.delivered:
                before = local.delivered
                await anyio.sleep(0.2)
            assert before < 5_000, "what two sockets and their buffers take is a few megabytes"
        await eventually(lambda: local.open == 0)


async def test_many_streams_at_once_over_one_socket() -> None:
    async with planes(TCP) as both:
        _, engine = await both.serve(ScriptedEngine(range(300)))
        lengths: list[int] = []

        async def one() -> None:
            lengths.append(len(await answer(engine)))

        async with anyio.create_task_group() as tasks:
            for _ in range(40):
                tasks.start_soon(one)
        assert lengths == [300] * 40
