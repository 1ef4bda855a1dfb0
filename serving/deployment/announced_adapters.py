"""The LoRA adapters of a server behind a worker, announced to the front ends of other processes as they change."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from engines import Worker
from pipeline import PenstockError

if TYPE_CHECKING:
    from engines.upstream import ServerFacts, Upstream

_log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""Wait before what could not be announced is announced again."""


@asynccontextmanager
async def announced_adapters(worker: Worker, engine: Upstream) -> AsyncIterator[None]:
    """Have the worker announce the adapters that its server has now, during the block.

    What cannot be announced, as discovery is away, is tried again.
    """
    changed, failure = anyio.Event(), None

    def note(_: ServerFacts) -> None:
        nonlocal changed
        changed.set()
        changed = anyio.Event()

    async def follow() -> None:
        shown = ""
        while True:
            news = changed
            try:
                await worker.announce_adapters(engine.known.adapters)
            except PenstockError as error:
                if str(error) != shown:
                    shown = str(error)
                    _log.warning("the adapters of %s are not announced yet: %s", worker, error)
                await anyio.sleep(AGAIN_S)
            else:
                await news.wait()

    engine.on_change = note
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        try:
            yield
        except Exception as error:  # the block's own: it is raised as it is, not inside a group
            failure = error
        finally:
            engine.on_change = None
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
