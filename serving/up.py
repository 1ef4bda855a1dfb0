"""up: workers and front ends on one machine as one supervised command.

    up ──► broker, if there is one     a nats-server; otherwise the processes find each other by files in a folder
     ├───► workers                     each hosts one engine
     ├───► front ends                  all behind one port, whose socket they inherit
     └───► admin address               metrics of all processes, and their state

The first signal ends front ends, then workers, then the broker, each in order; a second one ends all at once.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import anyio
from attrs import frozen

from engines import ShutdownTimes
from engines.worker import ProcessWatch

from .frontend import SHARED_HAND_OVER_S, admin_listener
from .http import HttpOptions, group_app
from .listeners import inherited_sockets, listen, url_of
from .processes import LaunchedProcesses, LogLines, ProcessGroup, Program, notify_ready
from .scrape import Scrape, scraped_text
from .server import GRACE, HAND_OVER, HttpServer, Interrupts, listening_after, run, running, until_signalled, watched
from .settings import RUNTIME_TOKEN, ServerOptions
from .socket import PORT_SHARES, PortShares
from .terminal import echo

BROKER, WORKERS, FRONTENDS = 0, 1, 2
"""Stages: each ends before the one below it."""

_LOOPBACK = "127.0.0.1"
_SLACK_S = 5.0
"""What a program has beyond its own deadline before it is killed."""
_CLOSE_S = 10.0
"""Time that the end of a front end may take beside that of its requests."""
_CUT_S = 3.0
"""Time to end all processes after a second signal."""
_PROBE_EVERY_S = 0.05

CommandOf = Callable[[str, Mapping[str, Any]], list[str]]
"""Returns the command of a program by its name, with values of its settings."""


@frozen
class Plan:
    """The processes of a deployment."""

    frontends: int
    """Front ends behind the port."""
    command_of: CommandOf
    """Gives the commands of workers and front ends."""
    worker_values: Sequence[Mapping[str, Any]] = ()
    """Settings of each worker."""
    prefill_values: Sequence[Mapping[str, Any]] = ()
    """Settings of each prefill worker."""
    runtime: str | None = None
    """URL of a runtime that is there already."""
    broker: Literal["file", "nats"] = "file"
    """What the runtime is otherwise: a fresh folder, or a nats-server that is started too."""


class Sockets:
    """The listening sockets that processes inherit; all are closed with the stack.

    `shares` is the file in which the front ends count their connections.
    """

    def __init__(self, opened: ExitStack, http: socket.socket, shares: Path) -> None:
        self.http, self.shares = http, shares
        self._opened = opened
        self.private: dict[str, socket.socket] = {}
        """Of admin addresses and of workers' states, by the name of the process."""

    def of(self, name: str) -> socket.socket:
        """Return the private one of a process, which listens from now on."""
        found = self.private[name] = self._opened.enter_context(listen(_LOOPBACK, 0))
        return found


def programs_of(plan: Plan, url: Callable[[], str], environment: Mapping[str, str], sockets: Sockets) -> list[Program]:
    """Return the programs of workers and front ends. `url` is called at each start, for that of the runtime."""

    def runtime() -> list[str]:
        return [f"--runtime={url()}"]

    ends = ShutdownTimes.from_environment(environment)
    hand_over_s = HAND_OVER.of(environment) or SHARED_HAND_OVER_S
    front_s = hand_over_s + GRACE.of(environment) + ends.timeout_s + _CLOSE_S + _SLACK_S
    worker_s = ends.deadline_s + _SLACK_S
    found = []
    for kind, values in (("prefill", plan.prefill_values), ("worker", plan.worker_values)):
        for number, each in enumerate(values, 1):
            name = f"{kind}-{number}"
            command = plan.command_of("worker", each)
            own = {"status": sockets.of(name)}
            found.append(Program(name, command, environment, WORKERS, end_s=worker_s, sockets=own, arguments=runtime))
    for number in range(1, plan.frontends + 1):
        name = f"frontend-{number}"
        command = plan.command_of("serve", {"processes": 1})
        own = {"http": sockets.http, "admin": sockets.of(name)}
        variables = {**environment, PORT_SHARES: f"{number - 1}:{sockets.shares}"}
        found.append(Program(name, command, variables, FRONTENDS, end_s=front_s, sockets=own, arguments=runtime))
    return found


def run_up(plan: Plan, options: ServerOptions, environment: Mapping[str, str]) -> None:
    """Run the deployment until a signal. Raise what keeps it from running, such as wrong options of its programs."""
    with ExitStack() as opened:
        inherited = opened.enter_context(inherited_sockets(environment))
        if (http := inherited.get("http")) is None:
            http = opened.enter_context(listen(options.listen.host, options.listen.port))
        if (admin := inherited.get("admin")) is None:
            admin = opened.enter_context(admin_listener(options.access.admin_host, options.access.admin_port or 0))
        folder = Path(opened.enter_context(TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True)))
        sockets = Sockets(opened, http, folder / "connections")
        PortShares.make(sockets.shares, plan.frontends)
        broker, url = _runtime(plan, folder, environment)
        programs = [*broker, *programs_of(plan, url, environment, sockets)]
        by_stage = {each.stage: each.end_s for each in programs}
        watch = ProcessWatch(sum(by_stage.values()) + _CLOSE_S, second_s=_CUT_S)
        with watched(watch):
            run(lambda: _supervise(programs, url, options, environment, folder, sockets, admin, watch), watch)


def _runtime(plan: Plan, folder: Path, environment: Mapping[str, str]) -> tuple[list[Program], Callable[[], str]]:
    """Return the broker, if one is started, and what returns the URL of the runtime once the broker serves."""
    if (given := plan.runtime) is not None:
        return [], lambda: given
    if plan.broker == "file":
        return [], lambda: f"file:{folder / 'runtime'}"
    from pipeline.network.nats import NatsServer, NatsServerOptions, nats_server_program

    token = environment.get(RUNTIME_TOKEN, "").strip() or None
    server = NatsServer(folder / "nats", NatsServerOptions(host=_LOOPBACK, token=token))

    def arguments() -> list[str]:
        return server.command()[1:]

    async def probe() -> str:
        while not server.find_port():  # noqa: ASYNC110  # what it waits for happens in another process
            await anyio.sleep(_PROBE_EVERY_S)
        return f"nats-server at {server.url}"

    command = [nats_server_program()]
    broker = Program("broker", command, environment, BROKER, is_awaited=True, probe=probe, arguments=arguments)
    return [broker], lambda: server.url


async def _supervise(
    programs: Sequence[Program],
    url: Callable[[], str],
    options: ServerOptions,
    environment: Mapping[str, str],
    folder: Path,
    sockets: Sockets,
    admin_listener: socket.socket,
    watch: ProcessWatch,
) -> None:
    """Run the programs until a signal, with the server of the admin address beside them."""
    serves = anyio.Event()

    def on_ready(program: Program, line: str) -> None:
        if program.stage == FRONTENDS and not serves.is_set():
            serves.set()
            what = line.partition("; admin at")[0]  # the one of this front end alone
            what += f"; admin at {url_of(admin_listener)}; runtime {url()}"
            with suppress(OSError):  # nobody reads it: the deployment serves all the same
                echo(what)
            notify_ready(environment, what)

    lines = LogLines(
        sys.stderr,
        [each.name for each in programs],
        is_coloured=sys.stderr.isatty() and not environment.get("NO_COLOR"),
        is_json=options.log.log_format == "json",
    )
    group = ProcessGroup(programs, LaunchedProcesses(folder, lines.write).start, on_ready=on_ready)
    metrics_path = HttpOptions.from_environment(environment).metrics_path
    scrapes = [
        Scrape(name, f"{url_of(each)}{metrics_path if name.startswith('frontend') else '/metrics'}")
        for name, each in sockets.private.items()
    ]

    async def metrics() -> str:
        serving = {state.name for state in group.states() if state.is_ready}
        return await scraped_text([each for each in scrapes if each.name in serving])

    admin = HttpServer(group_app(metrics, group.states), admin_listener)

    async def host(interrupts: Interrupts) -> None:
        interrupts.first, interrupts.second = group.end, group.kill
        await group.run()

    with listening_after(watch):
        async with running(admin.run):
            await until_signalled(host, watch)
            admin.stop(at_once=True)
