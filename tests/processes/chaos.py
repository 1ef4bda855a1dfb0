"""Chaos: faults at random moments in a deployment under load, and what must hold whatever happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

import anyio
from anyio.abc import TaskGroup
from attrs import define, field

from tests.processes.load import Load, Result
from tests.processes.proxy import Proxy, proxy
from tests.processes.worlds import Deployment, Program, Size, until

Fault = Callable[[], Coroutine[Any, Any, None]]

PAUSE_S = 30.0
"""How long a paused worker does nothing: longer than its lease, and than its connections are held for alive."""
LEASE_TTL_S = 10.0
"""Time for which a worker stays registered that does not renew it: the default of runtimes."""
LEASE_LATE_S = 3.0
"""Time that may pass from the end of a lease until it shows."""
SILENT_S = 20.0
"""How long a connection is half open: longer than it takes to be lost."""
REACHED_AGAIN_S = 20.0
"""Time for a worker that can be reached again to be connected to, which is tried every 10 s, and to answer."""
USED_BYTES = 10_000
"""More than connections take that are only made, and kept alive."""
GROWTH_MAX_BYTES = 40 * 1024 * 1024
"""For a process that works on, after its first requests."""
OPEN_FILES_MAX = 40
"""The same of its open files; each client has a connection."""


_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_WRONG = ("ERROR", "CRITICAL", "Traceback")


@define(eq=False)
class Chaos:
    """Faults for one deployment. `rng` draws which, whose and when."""

    world: Deployment
    load: Load
    rng: Random
    tasks: TaskGroup
    proxies: Sequence[Proxy] = ()
    """Between front ends and workers, in the order of the workers."""
    moves_enough: int | None = None
    """A request that has moved on so often may fail: its faults were more than are promised. None: none may fail."""
    done: Counter[str] = field(factory=Counter)
    """Faults there were, by name."""
    killed: set[tuple[str, int]] = field(factory=set)
    """Names and lives of the front ends that were killed."""
    sizes: dict[tuple[str, int], list[Size]] = field(factory=dict)
    """What each life of a program held, after each round that it was there for."""

    async def rounds(self, count: int, faults: Sequence[Fault], *, settles: bool = False) -> None:
        """Do a random fault per round, and wait for a moment in which requests run again.

        With `settles` the next fault comes once every front end knows every worker again.
        """
        for _ in range(count):
            fault = self.rng.choice(list(faults))
            self.done[fault.__name__] += 1
            await fault()
            if settles:
                await self.world.all_known()
            await anyio.sleep(self.rng.uniform(0.2, 1.5))
            self.measure()

    def measure(self) -> None:
        """Note what each program holds."""
        for each in self.world.programs:
            if each.is_running and not each.is_paused:
                self.sizes.setdefault((each.name, each.lives), []).append(each.size())

    async def kill_worker(self) -> None:
        """`kill -9` of a worker, which is started again."""
        worker = self._any_worker()
        worker.kill()
        await anyio.sleep(self.rng.uniform(0.0, 1.0))
        worker.start()
        await worker.ready()

    async def kill_front_end(self) -> None:
        """`kill -9` of a front end; clients send to the others until it is back."""
        await self.restart_front_end(self.rng.choice(self.world.in_rotation))

    async def restart_front_end(self, front_end: Program) -> None:
        """The same of this one."""
        self.world.in_rotation.remove(front_end)
        self.killed.add((front_end.name, front_end.lives))
        front_end.kill()
        front_end.start()
        await front_end.ready()
        self.world.in_rotation.append(front_end)

    async def pause_worker(self) -> None:
        """`SIGSTOP` of a worker for half a minute; the next rounds go on meanwhile. One is paused at a time."""
        if any(each.is_paused for each in self.world.workers):
            return await self.kill_worker()
        worker = self._any_worker()
        worker.pause()

        async def resume() -> None:
            await anyio.sleep(PAUSE_S)
            worker.resume()

        self.tasks.start_soon(resume)
        return None

    async def kill_broker(self) -> None:
        """`kill -9` of the broker, and its restart."""
        assert self.world.broker is not None
        self.world.broker.kill()
        await anyio.sleep(self.rng.uniform(0.0, 3.0))
        self.world.broker.start()
        await self.world.broker.ready()

    async def cut_connection(self) -> None:
        """Reset the connections to a worker."""
        self.rng.choice(self.proxies).cut()

    async def silence_connection(self) -> None:
        """Let nothing through to a worker and back, until its connections are lost; then new ones are made."""
        await self._silence(self.rng.choice(self.proxies))

    async def silence_meanwhile(self) -> None:
        """The same while the next rounds go on. The connections of one worker are silent at a time."""
        if any(each.is_silent for each in self.proxies):
            return await self.cut_connection()
        self.tasks.start_soon(self._silence, self.rng.choice(self.proxies))
        return None

    async def kill_in_silence(self) -> None:
        """`kill -9` of a worker whose connections are silent, and its restart: nothing of either gets through."""
        if not any(each.is_silent for each in self.proxies):
            await self.silence_meanwhile()
            await anyio.sleep(self.rng.uniform(0.0, 2.0))
        silent = next(number for number, each in enumerate(self.proxies) if each.is_silent)
        worker = self.world.workers[silent]
        worker.kill()
        worker.start()
        await worker.ready()

    async def _silence(self, silent: Proxy) -> None:
        silent.is_silent = True
        await anyio.sleep(SILENT_S)
        silent.cut()  # bytes are missing in them, as in no connection of a network that has come back
        silent.is_silent = False

    async def delay_connection(self) -> None:
        """Hold back what goes to a worker and comes from it, for some seconds."""
        slow = self.rng.choice(self.proxies)
        slow.delay_s = 0.2
        await anyio.sleep(3.0)
        slow.delay_s = 0.0

    def _any_worker(self) -> Program:
        return self.rng.choice([each for each in self.world.workers if not each.is_paused])

    async def all_work(self) -> None:
        """Wait until no program is paused and every one is ready."""
        for each in self.world.workers:
            each.resume()
        for each in (*self.world.workers, *self.world.front_ends):
            await each.ready()

    async def all_are_used(self) -> None:
        """Wait until every worker streams answers through its proxy again. Raise AssertionError if one does not."""
        await until(lambda: not any(each.is_silent for each in self.proxies), 2 * SILENT_S, "the silence ends")
        wanted = {each.host: each.passed_bytes + USED_BYTES for each in self.proxies}

        def unused() -> list[str]:
            return [each.host for each in self.proxies if each.passed_bytes < wanted[each.host]]

        with anyio.move_on_after(REACHED_AGAIN_S):
            while unused():  # noqa: ASYNC110 - what goes through a proxy raises no event here
                await anyio.sleep(0.1)
        assert not unused()

    async def only_the_living_are_registered(self) -> None:
        """Wait until the workers that run are registered, and no other. Raise AssertionError after a lease."""
        living = await self.world.living()
        ends_s = anyio.current_time() + LEASE_TTL_S + LEASE_LATE_S
        while True:
            is_due = anyio.current_time() >= ends_s  # no look that began before then counts, however long it took
            if (found := await self.world.registered()) == living:
                return
            assert not is_due, f"{found} are registered, {living} live"
            await anyio.sleep(0.5)

    def check_answers(self) -> None:
        """Raise AssertionError unless every answer was exact, but those of front ends that were killed."""
        strange = [
            result
            for result in self.load.not_exact()
            if not (result.outcome == "cut" and (result.front_end.name, result.life) in self.killed)
            and not self._met_too_many_faults(result)
        ]
        lines = [f"{each.front_end.name}, life {each.life}: {each.outcome}: {each.detail}" for each in strange]
        assert not lines, "\n".join([f"{len(lines)} of {len(self.load.results)}, after {dict(self.done)}", *lines[:20]])
        assert self.load.counts()["exact"] > 0

    def _met_too_many_faults(self, result: Result) -> bool:
        if self.moves_enough is None or result.outcome not in ("failed", "refused"):
            return False
        lines = result.front_end.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return sum(result.request_id in line and "moves on" in line for line in lines) >= self.moves_enough

    def check_logs(self) -> None:
        """Raise AssertionError if a program has logged an error: what these tests do to it is foreseen.

        Front ends log each request that may fail, as it met too many faults.
        """
        may_fail = {each.request_id for each in self.load.not_exact() if self._met_too_many_faults(each)}
        for name, log in self.world.logs():
            wrong = errors(log, may_fail)
            assert not wrong, "\n".join([f"{name}:", *wrong[:10]])

    def check_sizes(self) -> None:
        """Raise AssertionError if a program has grown from its second round to its last."""
        for (name, life), sizes in self.sizes.items():
            if len(sizes) < 4:
                continue
            first, last = sizes[1], sizes[-1]
            grown = last.resident_bytes - first.resident_bytes
            assert grown < GROWTH_MAX_BYTES, f"{name}, life {life}: {grown / 1e6:.1f} MB more"
            assert last.open_files < first.open_files + OPEN_FILES_MAX, f"{name}, life {life}: {first} to {last}"


def errors(log: str, may_fail: AbstractSet[str] = frozenset()) -> list[str]:
    """Return the lines of errors in a log, without the failures of these requests and their tracebacks."""
    found = list[str]()
    is_left_out = False
    for line in log.splitlines():
        if line.startswith(_LEVELS):
            _, is_failure, about = line.partition(": a request failed [request=")
            is_left_out = bool(is_failure) and about.split(" ", 1)[0] in may_fail
        if line.startswith(_WRONG) and not is_left_out:
            found.append(line)
    return found


@asynccontextmanager
async def under_load(
    world: Deployment, seed: int, clients: int = 12, *, moves_enough: int | None = None
) -> AsyncIterator[Chaos]:
    """Start a deployment and a load on it; at the end let every request end, and check answers, sizes and logs."""
    rng = Random(seed)
    async with AsyncExitStack() as opened:
        made = [proxy(host, ("127.0.0.1", port), port) for host, port in world.addresses]
        proxies = [await opened.enter_async_context(each) for each in made]
        await world.start()
        async with _loaded(world, rng, Random(seed + 1), clients, proxies) as chaos:
            chaos.moves_enough = moves_enough
            yield chaos
    chaos.check_answers()
    chaos.check_sizes()
    chaos.check_logs()


@asynccontextmanager
async def _loaded(
    world: Deployment, rng: Random, prompts: Random, clients: int, proxies: Sequence[Proxy]
) -> AsyncIterator[Chaos]:
    load = Load(lambda: rng.choice(world.in_rotation) if world.in_rotation else None, prompts, clients)
    async with anyio.create_task_group() as tasks:
        chaos = Chaos(world, load, rng, tasks, proxies)
        async with anyio.create_task_group() as requests:
            requests.start_soon(load.run)
            await anyio.sleep(2.0)
            chaos.measure()
            yield chaos
            load.is_over = True
        tasks.cancel_scope.cancel()
