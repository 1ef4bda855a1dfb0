"""FileObjects: the objects of a deployment in a shared folder, one file for each."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO, TypeAlias, TypeVar

import anyio
from anyio.lowlevel import checkpoint

from pipeline import Unavailable
from pipeline.errors import CannotConnect, InvalidMessage
from pipeline.rx import AnyIOScheduler, DisposableBase

from ..objects import READ_BYTES, ObjectName, Objects, name_of
from .folder import Folder, open_regular
from .folder_calls import FolderCalls, FolderOutage

T = TypeVar("T")

RESTORE_INTERVAL_S = 10.0
"""Seconds between two looks whether what was put is still there."""
_Run: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]


class FileObjects(Objects):
    """Objects as files of the folder that a FileStore uses, too; they stay after all processes have ended.

    A file is copied in parts, each with a time limit of its own: it may be large, and yet a folder that does not answer
    is noticed in time. With a scheduler, what this process has put and is gone from the folder is put again, as long as
    its file is as it was: a folder may be emptied, by hand or by what cleans up temporary files.
    """

    def __init__(self, folder: Path | str, scheduler: AnyIOScheduler | None = None, *, may_make: bool = True) -> None:
        """`may_make`: whether `open` makes what is missing of the folder."""
        self._folder = Folder(Path(folder))
        self._may_make = may_make
        self._scheduler = scheduler
        self._calls = FolderCalls(self._folder.path)
        self._put: dict[ObjectName, Path] = {}
        """What this process has put, and from where."""
        self._restoring: DisposableBase | None = None

    async def open(self) -> None:
        """Make the folder and its parts where they are missing, if that is wanted. Raise CannotConnect if it is not
        there then, or cannot be written."""
        try:
            await self._calls.run(self._folder.make if self._may_make else self._folder.require)
        except Unavailable as error:
            raise CannotConnect(str(error)) from error
        if self._scheduler is not None:
            self._restoring = self._scheduler.spawn(self._restore)

    async def put(self, path: Path) -> ObjectName:
        name = await name_of(path)
        if not await self._is_there(name):
            name = await self._copied(path)
        self._put[name] = path
        return name

    async def _copied(self, path: Path) -> ObjectName:
        copy = _Copy(path, self._folder.new_part(), _open_file)
        try:
            name = await copy.run(of_source=self._run_outside, of_part=self._calls.run)
            await self._calls.run(partial(copy.part.replace, self._path(name)))
        finally:
            await self._end(copy)
        return name

    async def get(self, name: ObjectName, target: Path) -> None:
        source = self._path(name)
        if not await self._calls.run(source.exists):
            raise Unavailable(f"there is no object {name.sha256} in {self._folder.path}")
        copy = _Copy(source, target.with_name(f".{target.name}.{self._folder.new_part().name}"), _open_object)
        try:
            found = await copy.run(of_source=self._calls.run, of_part=self._run_outside)
            if found != name:
                text = f"{found.size_bytes} bytes with the sum {found.sha256}, not {name.size_bytes}"
                raise InvalidMessage(f"the object {name.sha256} came with {text}")
            await self._run_outside(partial(copy.part.replace, target))
        finally:
            await self._end(copy)

    async def close(self) -> None:
        if self._restoring is not None:
            self._restoring.dispose()
        await checkpoint()

    async def _restore(self, scope: anyio.CancelScope) -> None:
        outage = FolderOutage(f"objects that are gone from {self._folder.path} are not put again")
        with scope:
            while True:
                await anyio.sleep(RESTORE_INTERVAL_S)
                try:
                    await self._restored()
                    outage.ended()
                except Exception as error:  # whatever it is, it must not end the runtime
                    outage.failed(error)

    async def _restored(self) -> None:
        for name, path in list(self._put.items()):
            if not await self._is_there(name) and await self._copied(path) != name:
                del self._put[name]  # the file has changed since

    async def _is_there(self, name: ObjectName) -> bool:
        return await self._calls.run(partial(_has_size, self._path(name), name.size_bytes))

    def _path(self, name: ObjectName) -> Path:
        return self._folder.objects / f"{name.sha256}-{name.size_bytes}"

    async def _run_outside(self, work: Callable[[], T]) -> T:
        """Call the function for a file that is not of the folder: its OSError is the caller's."""

        def worked() -> tuple[T, None] | tuple[None, OSError]:
            try:
                return work(), None
            except OSError as error:
                return None, error

        result, error = await self._calls.run(worked)
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    async def _end(self, copy: _Copy) -> None:
        with anyio.CancelScope(shield=True), suppress(Unavailable):
            await self._calls.run(copy.end)


class _Copy:
    """A file that is copied to a new one, `part`, and its name computed. After it has ended, there is no part."""

    def __init__(self, source: Path, part: Path, opens: Callable[[Path], BinaryIO]) -> None:
        self.part = part
        self._source, self._opens = source, opens
        self._files = ExitStack()
        self._reading: BinaryIO
        self._writing: BinaryIO
        self._sum, self._size_bytes = sha256(), 0

    async def run(self, *, of_source: _Run, of_part: _Run) -> ObjectName:
        """Copy all. The two run what blocks."""
        await of_source(self._open_source)
        await of_part(self._open_part)
        while content := await of_source(self._read):
            await of_part(partial(self._write, content))
        await of_part(self._files.close)
        return ObjectName(self._sum.hexdigest(), self._size_bytes)

    def end(self) -> None:
        with suppress(OSError):  # what could not be written is not wanted
            self._files.close()
        self.part.unlink(missing_ok=True)

    def _open_source(self) -> None:
        self._reading = self._files.enter_context(self._opens(self._source))

    def _open_part(self) -> None:
        self._writing = self._files.enter_context(self.part.open("xb"))

    def _read(self) -> bytes:
        return self._reading.read(READ_BYTES)

    def _write(self, content: bytes) -> None:
        self._writing.write(content)
        self._sum.update(content)
        self._size_bytes += len(content)


def _open_file(path: Path) -> BinaryIO:
    return path.open("rb")


def _open_object(path: Path) -> BinaryIO:
    """Open a file of the folder. What else lies there, such as a pipe, could keep the thread for good."""
    return os.fdopen(open_regular(path), "rb")


def _has_size(path: Path, size_bytes: int) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return S_ISREG(found.st_mode) and found.st_size == size_bytes
