"""Builders for tests of a shared folder: several stores over one, and faults of it."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from attrs import define, field

from pipeline.network.discovery import Gone, Put
from pipeline.network.files import FileStore
from pipeline.network.files.folder_calls import FolderCalls
from pipeline.rx import AnyIOScheduler
from tests.pipeline.network.worlds import TTL_S, folder_clock


@define
class Deployment:
    """Stores over one folder, each as if it were the only one of its process."""

    path: Path
    offset_ns: int = 0
    """By how much the folder's clock was set."""
    stopped: dict[FolderCalls, anyio.Event] = field(factory=dict)
    unreachable: set[FolderCalls] = field(factory=set)

    @property
    def records(self) -> Path:
        return self.path / "records"

    @asynccontextmanager
    async def store(self) -> AsyncIterator[FileStore]:
        """Return one more store, open. At the end nothing watches it any more."""
        now_ns = folder_clock()
        async with AnyIOScheduler() as scheduler:
            store = FileStore(self.path, scheduler, TTL_S, now_ns=lambda: now_ns() + self.offset_ns)
            await store.open()
            yield store
            await store.close()
            assert store.watchers == 0

    def stop(self, store: FileStore) -> None:
        """Let the store's process stand still, as SIGSTOP does, until `go_on`."""
        self.stopped[store._calls] = anyio.Event()

    def go_on(self, store: FileStore) -> None:
        self.stopped.pop(store._calls).set()

    def kill(self, store: FileStore) -> None:
        """Let the store's process be gone, as SIGKILL does."""
        assert store._renewing is not None
        store._renewing.dispose()
        store._own.clear()

    def cut(self, *stores: FileStore) -> None:
        """Let every access of these stores to the folder fail, until `mend`."""
        self.unreachable.update(store._calls for store in stores)

    def mend(self) -> None:
        self.unreachable.clear()

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make `stop` and `cut` work."""
        run = FolderCalls.run

        async def patched(calls: FolderCalls, work: Callable[[], Any]) -> Any:
            if (stopped := self.stopped.get(calls)) is not None:
                await stopped.wait()
            return await run(calls, self._fail if calls in self.unreachable else work)

        monkeypatch.setattr(FolderCalls, "run", patched)

    def _fail(self) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def keys_of(received: list[Any]) -> dict[str, bytes]:
    """Return what the changes of a watch add up to."""
    known: dict[str, bytes] = {}
    for change in received:
        if isinstance(change, Put):
            known[change.key] = change.value
        elif isinstance(change, Gone):
            del known[change.key]
    return known
