"""The store of one process: a dict."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from pipeline.rx import AnyIOScheduler, DisposableBase, Observable, ObserverBase

from .fanout import Fanout
from .names import matches_prefix
from .store import Change, Gone, Put, Store, Written


@frozen
class _Entry:
    value: bytes
    revision: int


class InProcessStore(Store):
    """A dict. Its owner lives as long as it does, so nothing is renewed: only what was abandoned runs out.

    For one thread; `scheduler` counts the time of what was abandoned, which stays `ttl_s`.
    """

    def __init__(self, scheduler: AnyIOScheduler, ttl_s: float) -> None:
        self._scheduler = scheduler
        self._ttl_s = ttl_s
        self._entries: dict[str, _Entry] = {}
        self._lapsing: dict[str, DisposableBase] = {}
        self._watchers: Fanout[Change] = Fanout()

    @property
    def watchers(self) -> int:
        """How many watch."""
        return len(self._watchers)

    async def create(self, key: str, value: bytes) -> Written:
        if (entry := self._entries.get(key)) is not None:
            return Written("exists", entry.revision)
        self._write(key, _Entry(value, 0))
        return Written("created", 0)

    async def replace(self, key: str, value: bytes, revision: int) -> Written:
        if (entry := self._entries.get(key)) is None:
            return Written("missing")
        if entry.revision != revision:
            return Written("retry", entry.revision)
        self._write(key, _Entry(value, revision + 1))
        return Written("created", revision + 1)

    async def delete(self, key: str) -> None:
        self._remove(key)

    async def get(self, key: str) -> Put | None:
        entry = self._entries.get(key)
        return None if entry is None else Put(key, entry.value, entry.revision)

    async def entries(self, prefix: str = "") -> dict[str, bytes]:
        return {put.key: put.value for put in self._under(prefix)}

    def watch(self, prefix: str = "") -> Observable[Change]:
        def subscribe(observer: ObserverBase[Change], _: Any = None) -> DisposableBase:
            return self._watchers.add(
                observer, first=self._under(prefix), accepts=lambda change: matches_prefix(change.key, prefix)
            )

        return Observable(subscribe)

    def abandon(self, key: str) -> None:
        if key in self._entries and key not in self._lapsing:
            self._lapsing[key] = self._scheduler.schedule_relative(self._ttl_s, lambda *_: self._remove(key))

    async def close(self) -> None:
        for key in list(self._entries):
            self._remove(key)
        self._watchers.complete()

    def _under(self, prefix: str) -> list[Put]:
        return [
            Put(key, entry.value, entry.revision)
            for key, entry in sorted(self._entries.items(), key=lambda item: item[0])
            if matches_prefix(key, prefix)
        ]

    def _write(self, key: str, entry: _Entry) -> None:
        self._renew(key)
        self._entries[key] = entry
        self._watchers.push(Put(key, entry.value, entry.revision))

    def _remove(self, key: str) -> None:
        self._renew(key)
        if self._entries.pop(key, None) is not None:
            self._watchers.push(Gone(key))

    def _renew(self, key: str) -> None:
        if (lapsing := self._lapsing.pop(key, None)) is not None:
            lapsing.dispose()
