"""LaunchedProcesses: programs as real child processes, which never outlive this one (on Linux)."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

import anyio
from anyio.abc import Process

from .notify import NOTIFY_SOCKET, ready_status
from .process_group import Child, Program

_BOUND_EXEC = str(Path(__file__).with_name("bound_exec.py"))

_LAST_LINES = 20
"""Lines kept of what a program prints."""
_LINE_BYTES_MAX = 64 * 1024
"""A longer line is written in parts."""
_REST_S = 0.5
"""How long the lines of a program that has ended are waited for: its own children may keep the pipe open."""
_NOTICE_BYTES_MAX = 4096

Write = Callable[[str, Sequence[str]], Awaitable[None]]


class LaunchedProcesses:
    """Starts programs in sessions of their own, which signals of a terminal do not reach.

    `folder` is a private one for the sockets of notices; `write` gets the name of a program and lines that it printed.
    A program is killed when this process has ended, in whatever way, and from its very start: see `bound_exec`.
    """

    def __init__(self, folder: Path, write: Write) -> None:
        self._folder, self._write = folder, write

    @asynccontextmanager
    async def start(self, program: Program) -> AsyncIterator[Child]:
        """Give the program, started. The end of the block kills what is left of it, and writes its last lines."""
        path = self._folder / f"{program.name}.notify"
        path.unlink(missing_ok=True)
        async with AsyncExitStack() as opening:
            notices = opening.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            notices.setblocking(False)
            notices.bind(str(path))
            files = {name: each.fileno() for name, each in program.sockets.items()}
            sockets = ",".join(f"{name}={file}" for name, file in files.items())
            process = await anyio.open_process(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    _BOUND_EXEC,
                    str(os.getpid()),
                    sockets,
                    *program.command,
                    *program.arguments(),
                ],
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                env={**program.environment, NOTIFY_SOCKET: str(path)},
                start_new_session=True,
                pass_fds=tuple(files.values()),
            )
            child = _LaunchedProcess(program, process, notices)
            opening.push_async_callback(process.aclose)  # which kills it
            tasks = await opening.enter_async_context(anyio.create_task_group())
            tasks.start_soon(child.read, self._write)
            try:
                yield child
            finally:
                child.kill()
                with anyio.move_on_after(_REST_S, shield=True):
                    await child.was_read.wait()
                tasks.cancel_scope.cancel()


class _LaunchedProcess(Child):
    """A child process, its output and the socket of its notices."""

    def __init__(self, program: Program, process: Process, notices: socket.socket) -> None:
        self._program, self._process, self._notices = program, process, notices
        self.pid = process.pid
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.was_read = anyio.Event()

    async def ready(self) -> str:
        if self._program.probe is not None:
            return await self._program.probe()
        while True:
            await anyio.wait_readable(self._notices)
            with suppress(BlockingIOError):
                if (status := ready_status(self._notices.recv(_NOTICE_BYTES_MAX))) is not None:
                    return status

    async def ended(self) -> int:
        code = await self._process.wait()
        with anyio.move_on_after(_REST_S):
            await self.was_read.wait()
        return code

    def terminate(self) -> None:
        with suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        # With what it has started itself, also where it has ended and left that behind.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def last_lines(self) -> list[str]:
        return list(self._last_lines)

    async def read(self, write: Write) -> None:
        """Pass on what the program prints, to its end."""
        assert self._process.stdout is not None
        rest = b""
        try:
            async for part in self._process.stdout:
                *whole, rest = (rest + part).split(b"\n")
                if len(rest) > _LINE_BYTES_MAX:
                    whole, rest = [*whole, rest], b""
                await self._pass_on(whole, write)
            await self._pass_on([rest] if rest else [], write)
        finally:
            self.was_read.set()

    async def _pass_on(self, lines: Sequence[bytes], write: Write) -> None:
        if texts := [line.decode(errors="replace").rstrip("\r") for line in lines]:
            self._last_lines.extend(text for text in texts if text.strip())
            await write(self._program.name, texts)
