"""FileStore: discovery by a shared folder, without a server.

create, replace ──► a file for each key, and one for the lease, touched every third of the time to live
                          │
watch ◄── differences ◄── looked at every quarter of a second, while a watch is open
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import TypeVar

import anyio

from pipeline import InvalidArgument, Unavailable
from pipeline.errors import CannotConnect
from pipeline.rx import AnyIOScheduler, CompositeDisposable, Disposable, DisposableBase, Observable, ObserverBase

from ..discovery import Change, Gone, Put, Store, Written
from ..events import Fanout
from ..names import matches_prefix
from .folder import S_NS, Folder
from .folder_calls import FolderCalls, FolderOutage
from .record_index import LeaseLapsed, RecordIndex, View
from .stored import name_beginning

T = TypeVar("T")

_log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.25
_RENEWALS_A_LIFE = 3
_RETRY_S = 1.0
"""Seconds until a look or a renewal that failed is tried again."""
_TIDY_INTERVAL_S = 60.0
_TTL_MIN_S = 1.0
_CLOSE_TIMEOUT_S = 2.0


class FileStore(Store):
    """Keys as files of a folder that all processes of a deployment share: one machine's, or a network file system's.

    The time to live of a store's keys counts from the last touch of its lease, by the clock of the file system;
    `now_ns`, nanoseconds since 1970, replaces that clock and may be called in a thread. All processes have the same
    `ttl_s`. For one event loop; what blocks runs in a thread.

    A folder that is full, read-only, unreachable or gone stops discovery from changing: writes raise Unavailable,
    watches keep what they know, and it goes on by itself, with the keys of this process. The log has it once a minute.
    No lease ends by this: one counts only while its renewals could be seen. On a full disk, leases are renewed.

    A lease that ran out while its process stood still is written again once it runs, unless the key is another's by
    then.

    Source: dynamo lib/runtime/src/storage/kv/file.rs. Other than there, a process touches one file, not one for each
    key; changes are found by the folder's times instead of inotify, which does not see what other machines write; and
    revisions are checked.
    """

    def __init__(
        self,
        folder: Path | str,
        scheduler: AnyIOScheduler,
        ttl_s: float = 10.0,
        *,
        rng: Random | None = None,
        now_ns: Callable[[], int] | None = None,
        may_make: bool = True,
    ) -> None:
        """`may_make`: whether `open` makes what is missing of the folder."""
        if not ttl_s >= _TTL_MIN_S:
            raise InvalidArgument(f"must be at least {_TTL_MIN_S:g} s, got {ttl_s}", field="ttl_s")
        self._scheduler, self._ttl_s, self._may_make = scheduler, ttl_s, may_make
        self._folder = Folder(Path(folder), now_ns)
        self._index = RecordIndex(self._folder, round(ttl_s * S_NS))
        self._rng = rng or Random()
        self._calls = FolderCalls(self._folder.path)
        self._own: dict[str, Put] = {}
        self._dropping: dict[str, Put] = {}
        """Keys that are not held and may still be in the folder: a removal failed, or a write was not waited for."""
        self._known: dict[str, Put] = {}
        """What the watches have been given, while there are any."""
        self._version = -1
        self._watchers: Fanout[Change] = Fanout()
        self._looking: DisposableBase | None = None
        self._renewing: DisposableBase | None = None
        self._is_closed = False

    @property
    def watchers(self) -> int:
        """Number of watches."""
        return len(self._watchers)

    async def open(self) -> None:
        """Make the folder and its parts where they are missing, if that is wanted. Raise CannotConnect if it is not
        there then, or cannot be written."""
        try:
            await self._calls.run(self._folder.make if self._may_make else self._folder.require)
            await self._calls.run(self._folder.now)
        except Unavailable as error:
            raise CannotConnect(str(error)) from error
        self._renewing = self._scheduler.spawn(self._renew)

    async def create(self, key: str, value: bytes) -> Written:
        # A key created anew must not have the revision it had before: a writer that knows that one knows another value.
        put = Put(key, value, self._rng.getrandbits(48))
        return await self._write(put, lambda: self._index.create(put))

    async def replace(self, key: str, value: bytes, revision: int) -> Written:
        put = Put(key, value, revision + 1)
        return await self._write(put, lambda: self._index.replace(put, revision))

    async def delete(self, key: str) -> None:
        put = self._own.pop(key, None)
        if self._is_closed:
            return
        try:
            await self._run(lambda: self._index.delete(key))
        except BaseException:
            if put is not None:
                self._dropping[key] = put
            raise

    async def get(self, key: str) -> Put | None:
        return await self._run(lambda: self._index.get(key))

    async def entries(self, prefix: str = "") -> dict[str, bytes]:
        process_ns = self._process_ns()
        beginning = name_beginning(prefix) if self._looking is None else ""
        alive = await self._run(lambda: self._index.look(process_ns, beginning).alive)
        return {put.key: put.value for put in _under(alive, prefix)}

    def watch(self, prefix: str = "") -> Observable[Change]:
        def subscribe(observer: ObserverBase[Change], _: object = None) -> DisposableBase:
            if self._looking is None and not self._is_closed:
                self._known, self._version = dict(self._own), -1
                self._looking = self._scheduler.spawn(self._look)
            listening = self._watchers.add(
                observer,
                first=_under(self._known, prefix),
                accepts=lambda change: matches_prefix(change.key, prefix),
            )
            return CompositeDisposable(listening, Disposable(self._rest))

        return Observable(subscribe)

    def abandon(self, key: str) -> None:
        """Stop renewing the key: it is removed at the end of its time to live, unless it is written before."""
        if (put := self._own.pop(key, None)) is not None:
            self._scheduler.schedule_relative(self._ttl_s, lambda *_: self._drop_later(put))

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        own, self._own = self._own, {}
        for work in (self._looking, self._renewing):
            if work is not None:
                work.dispose()
        try:
            with anyio.fail_after(_CLOSE_TIMEOUT_S):
                await self._run(lambda: self._index.leave(own))
        except (Unavailable, TimeoutError) as error:
            if own:
                _log.warning("%d keys could not be removed, their leases run out: %s", len(own), error)
        finally:
            self._watchers.complete()

    async def _run(self, work: Callable[[], T]) -> T:
        """Run the work in the thread of the folder, and give the watches what it has changed."""
        is_watched = self._looking is not None

        def worked() -> tuple[T, View]:
            result, view = work(), self._index.view
            if not is_watched:
                self._index.forget()
            return result, view

        result, view = await self._calls.run(worked)
        if is_watched:
            self._show(view)
        return result

    def _drop_later(self, put: Put) -> None:
        self._dropping[put.key] = put
        self._scheduler.spawn(self._drop)

    async def _drop(self, scope: anyio.CancelScope) -> None:
        with scope, suppress(Unavailable):  # tried again with the next renewal
            await self._dropped()

    async def _dropped(self) -> None:
        """Remove what is no longer held. Raise Unavailable if that fails."""
        for key in list(self._dropping):
            await self._dropped_one(key)

    async def _dropped_one(self, key: str) -> None:
        if (put := self._dropping.get(key)) is None:
            return
        if key not in self._own and not self._is_closed:
            await self._run(partial(self._index.drop, put))
        if self._dropping.get(key) is put:  # not one that was given up meanwhile
            del self._dropping[key]

    async def _write(self, put: Put, work: Callable[[], Written]) -> Written:
        if self._is_closed:
            raise Unavailable(f"the store in {self._folder.path} is closed here: nothing would renew a key")
        await self._dropped_one(put.key)
        try:
            written = await self._written(work)
        except (Unavailable, anyio.get_cancelled_exc_class()):
            if put.key not in self._own:  # the thread may write it all the same, and nobody would ever remove it
                self._dropping[put.key] = put
            raise
        if written.outcome == "created":
            self._own[put.key] = put
        return written

    async def _written(self, work: Callable[[], Written]) -> Written:
        try:
            return await self._run(work)
        except LeaseLapsed:  # the process stood still
            await self._renewed()
        try:
            return await self._run(work)
        except LeaseLapsed as error:
            raise Unavailable(f"the lease in {self._folder.path} runs out faster than it is renewed") from error

    def _show(self, view: View) -> None:
        """Give the watches the difference. A view that comes after a later one is out of date."""
        if view.version <= self._version:
            return
        self._version = view.version
        known, self._known = self._known, dict(view.alive)
        for key in sorted(known.keys() - view.alive.keys()):
            self._watchers.push(Gone(key))
        for key in sorted(key for key, put in view.alive.items() if known.get(key) != put):
            self._watchers.push(view.alive[key])

    def _rest(self) -> None:
        """Look no longer if there are no watches."""
        if not self._watchers and self._looking is not None:
            self._looking.dispose()
            self._looking = None

    async def _look(self, scope: anyio.CancelScope) -> None:
        outage = FolderOutage(f"discovery by {self._folder.path} stands still")
        is_first, tidied_s = True, anyio.current_time()
        with scope:
            while True:
                pause_s = LOOK_INTERVAL_S
                try:
                    await self._run(self._looked(is_first))
                    if anyio.current_time() - tidied_s >= _TIDY_INTERVAL_S:
                        tidied_s = anyio.current_time()
                        await self._calls.run(self._index.tidy)
                    is_first = False
                    outage.ended()
                except Exception as error:  # whatever it is, it must not end the runtime
                    outage.failed(error)
                    pause_s = _RETRY_S
                await anyio.sleep(pause_s)

    def _looked(self, is_first: bool) -> Callable[[], None]:
        process_ns = self._process_ns()

        def work() -> None:
            if is_first:
                self._index.forget()
            self._index.look(process_ns)
            self._index.sweep()

        return work

    async def _renew(self, scope: anyio.CancelScope) -> None:
        outage = FolderOutage(f"leases in {self._folder.path} are not renewed")
        with scope:
            while True:
                pause_s = self._ttl_s / _RENEWALS_A_LIFE
                try:
                    await self._renewed()
                    outage.ended()
                except Exception as error:  # whatever it is, it must not end the runtime
                    outage.failed(error)
                    pause_s = min(pause_s, _RETRY_S)
                await anyio.sleep(pause_s)

    async def _renewed(self) -> None:
        def renewed() -> tuple[dict[str, Put], dict[str, Put | None]]:
            own = dict(self._own)  # not before: the call may have waited for the lock, and keys were deleted meanwhile
            return own, self._index.renew(own)

        own, changed = await self._run(renewed)
        for key, found in changed.items():
            if self._own.get(key) != own[key]:
                continue  # written meanwhile
            if found is None:
                del self._own[key]
            else:
                self._own[key] = found
        await self._dropped()

    def _process_ns(self) -> int:
        return round(anyio.current_time() * S_NS)


def _under(alive: Mapping[str, Put], prefix: str) -> list[Put]:
    return [put for key, put in sorted(alive.items()) if matches_prefix(key, prefix)]
