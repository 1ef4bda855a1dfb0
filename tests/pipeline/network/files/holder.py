"""A process with keys in a folder, for tests that kill and stop it: python -m tests.pipeline.network.files.holder ...

hold FOLDER TTL PREFIX COUNT    create the keys, print a line, hold them until the end of the input
count FOLDER TTL KEY TIMES      add 1 to the number at the key, so many times, against others who do the same
lock FOLDER                     lock the folder and print a line
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio

from pipeline.network.files import FileStore
from pipeline.network.files.folder import Folder
from pipeline.rx import AnyIOScheduler


async def hold(folder: str, ttl_s: str, prefix: str, count: str) -> None:
    async with AnyIOScheduler() as scheduler:
        store = FileStore(folder, scheduler, float(ttl_s))
        await store.open()
        for number in range(int(count)):
            assert (await store.create(f"{prefix}/{number}", b"%d" % number)).outcome == "created"
        print("ready", flush=True)  # noqa: T201
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        await store.close()


async def count(folder: str, ttl_s: str, key: str, times: str) -> None:
    async with AnyIOScheduler() as scheduler:
        store = FileStore(folder, scheduler, float(ttl_s))
        await store.open()
        for _ in range(int(times)):
            outcome = ""
            while outcome != "created":
                known = await store.get(key)
                assert known is not None
                outcome = (await store.replace(key, b"%d" % (int(known.value) + 1), known.revision)).outcome


async def lock(folder: str) -> None:
    with Folder(Path(folder)).locked():
        print("ready", flush=True)  # noqa: T201
        sys.stdin.read()


ROLES: dict[str, Callable[..., Awaitable[None]]] = {"hold": hold, "count": count, "lock": lock}

if __name__ == "__main__":
    anyio.run(ROLES[sys.argv[1]], *sys.argv[2:])
