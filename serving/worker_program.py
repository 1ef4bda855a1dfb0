"""The program of a worker: one engine by the life-cycle of a worker.

penstock worker ENGINE                   a deployment of its own, with an OpenAI server beside it
penstock worker ENGINE --runtime URL     one worker of a deployment, for front ends in other processes
penstock worker --upstream URL ...       the same for a server that runs already
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, closing
from functools import partial

import anyio

from engines import LLMEngine, ShutdownTimes, SystemHealth, Worker
from engines.torch import ReportProgress
from engines.worker import ProcessWatch
from operators import Model
from pipeline.network import Runtime
from pipeline.telemetry import merged

from .deployment import HostOptions, Supervisor, event_log, graphs_of, routing_to, upstream_workers
from .frontend import Frontend, Host, also_at, announce
from .garbage import settle
from .server import Interrupts, listening_after, running, until_signalled
from .status import ProcessStatus, serving_status, status_endpoint

_LOOK_EVERY_S = 0.2
"""Between two looks at which servers are in service."""

Made = tuple[Model, LLMEngine]


def worker_watch(environment: Mapping[str, str]) -> ProcessWatch:
    """Return the watch for a worker, not started."""
    return ProcessWatch(ShutdownTimes.from_environment(environment).deadline_s)


async def host_worker(front: Frontend) -> None:
    """Host one engine with the life-cycle of a worker, signals included, and a server beside it.

    Raise the error of a worker that cannot start. `Worker.run` describes the effect of signals; after the first one new
    requests are refused.
    """
    config, health = front.config, SystemHealth.from_environment(front.environment)
    with front.status_listener() as status, front.admin_listener() as admin, ExitStack() as bar:
        async with front.open_runtime() as runtime:
            if (made := await _made(front, bar.enter_context(front.loading()))) is None:
                return
            model, worker = made[0], _worker_of(made, front, runtime, health)
            async with routing_to(worker.endpoint, config, front.hosting(), runtime) as routing:
                graph, _ = graphs_of(model, routing, config, front.hosting(), None, lambda: {worker.worker_id})
                server, beside = front.server(graph), front.admin_servers(graph, admin)
                states = front.status_servers(health, status)

                async def serves() -> None:
                    await routing.workers.wait_for_instances()
                    bar.close()
                    health.set_process_ready(True)
                    settle()
                    where = f"{worker.endpoint.path}; serving {front.model_names} at {server.url}"
                    also = also_at("status", states) + also_at("admin", beside)
                    announce(f"Hosting {config.engine} at {where}{also}", front)

                async def refuse() -> None:
                    await worker.wait()
                    health.set_process_ready(False)
                    await front.availability.drain(worker.times.deadline_s)

                servers = [server, *states, *beside]
                runs = (one.run for one in servers)
                with listening_after(front.watch):
                    async with running(*runs, serves, refuse, front.gate.follow):
                        try:
                            await worker.run()
                        finally:
                            for one in servers:
                                one.stop()


async def host_announced_worker(host: Host) -> None:
    """Host one engine for the front ends of a runtime, with its status if that is wanted, until a signal.

    Raise the error of a worker that cannot start, and CannotConnect for a runtime that cannot be reached.
    """
    health = SystemHealth.from_environment(host.environment)
    with host.status_listener() as status, ExitStack() as bar:
        async with host.open_runtime() as runtime:
            if (made := await _made(host, bar.enter_context(host.loading()))) is None:
                return
            worker = _worker_of(made, host, runtime, health)
            states = host.status_servers(health, status, is_first=True)

            async def serves() -> None:
                await _registered(worker, runtime)
                bar.close()
                health.set_process_ready(True)
                settle()
                where = f"{worker.endpoint.path} as {worker.worker_id:x}{also_at('status', states)}"
                announce(f"Hosting {host.config.engine} at {where}", host)

            async def end_ready() -> None:
                await worker.wait()
                health.set_process_ready(False)

            with listening_after(host.watch):
                async with (
                    _answering(runtime, worker),
                    running(*(one.run for one in states), serves, end_ready),
                ):
                    try:
                        await worker.run()
                    finally:
                        for one in states:
                            one.stop()


async def host_upstream_workers(host: Host) -> None:
    """Stand for servers in a runtime, each of them a worker of it, until a signal.

    A server that is down is tried again. Raise InvalidArgument for a `model_path` where nothing is, and CannotConnect
    for a runtime that cannot be reached.
    """
    environment, health = host.environment, SystemHealth.from_environment(host.environment)
    ending = anyio.Event()
    hosting = HostOptions(
        environment,
        host.telemetry.component_metrics,
        health,
        tracer=host.tracer,
        times=ShutdownTimes.from_environment(environment),
    )

    async def serve(interrupts: Interrupts) -> None:
        interrupts.first = ending.set
        interrupts.second = cut.cancel
        async with (
            host.open_runtime() as runtime,
            upstream_workers(host.config, hosting, runtime, partial(_answering, runtime)) as supervisors,
            running(partial(_watch_servers, supervisors, host, health)),
        ):
            host.telemetry.add_text(lambda: merged(_texts(supervisors)))
            host.telemetry.models.add(lambda: [one.card for one in _workers(supervisors)], host.config.migration_limit)
            await ending.wait()

    with host.status_listener() as status, listening_after(host.watch):
        states = host.status_servers(health, status, is_first=True)
        async with running(*(one.run for one in states)):
            with anyio.CancelScope() as cut:
                await until_signalled(serve, host.watch)
            for one in states:
                one.stop(at_once=True)


def _workers(supervisors: Sequence[Supervisor]) -> list[Worker]:
    return [one.worker for one in supervisors if one.worker is not None]


def _texts(supervisors: Sequence[Supervisor]) -> list[str]:
    return [worker.native_metrics() for worker in _workers(supervisors)]


async def _watch_servers(supervisors: Sequence[Supervisor], host: Host, health: SystemHealth) -> None:
    """Have the process ready while one of the servers is in service, and announce the first one."""
    is_announced = False
    while True:
        found = _workers(supervisors)
        health.set_process_ready(bool(found))
        if found and not is_announced:
            is_announced = True
            announce(f"Hosting {', '.join(one.name for one in supervisors)} at {found[0].endpoint.path}", host)
        await anyio.sleep(_LOOK_EVERY_S)


def _answering(runtime: Runtime, worker: Worker) -> AbstractAsyncContextManager[None]:
    """Return what answers about the worker while it is in service."""
    at = status_endpoint(worker.endpoint)
    return serving_status(runtime, at, partial(_about, worker), worker.worker_id)


def _about(worker: Worker) -> ProcessStatus:
    return ProcessStatus(0 if worker.served is None else worker.served.running)


async def _made(host: Host, report_loading: ReportProgress) -> Made | None:
    """Return the model and the engine, not started; None if a signal came before. A factory may take long."""
    made: list[Made] = []

    async def make(_: object) -> None:
        model = await host.config.loaded_model()
        deployment = host.config.deployment(host.config.modes[0])
        deployment.report_loading = report_loading
        (engine,) = await host.config.make_engines(1, deployment)
        made.append((model, engine))

    with listening_after(host.watch):
        await until_signalled(make, host.watch)  # later the worker handles signals itself
    return None if host.watch.is_ending or not made else made[0]  # a factory may block the loop, and then return


def _worker_of(made: Made, host: Host, runtime: Runtime, health: SystemHealth) -> Worker:
    """Return the worker of the engine, whose metrics are shown from now on."""
    model, engine = made
    config = host.config if host.runtime is None else host.config.in_namespace_of(model.name)
    worker = Worker(
        engine,
        config.worker_settings(model),
        runtime=runtime,
        metrics=host.telemetry.component_metrics,
        environment=host.environment,
        health=health,
        kv_event_log=event_log,
        tracer=host.tracer,
        watch=host.watch,
    )
    host.telemetry.add_text(worker.native_metrics)
    host.telemetry.models.add(lambda: [worker.card], host.config.migration_limit)
    return worker


async def _registered(worker: Worker, runtime: Runtime) -> None:
    """Return once the worker is found in the runtime."""
    found = anyio.Event()
    with closing(runtime.workers(worker.endpoint)) as workers:
        following = workers.follow(lambda members: found.set() if worker.worker_id in members.ids else None)
        try:
            await found.wait()
        finally:
            following.dispose()
