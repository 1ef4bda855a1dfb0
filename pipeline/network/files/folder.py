"""A shared folder: its parts, its clock, its lock, and files that appear whole.

    DIR/records/  a file for each key; and `.id`, a random text: after the folder was emptied it is another one
        leases/   an empty file for each process that has keys, touched while it runs
        objects/  a file for each object
        work/     files that are being written, and one of each process whose time is read
        lock      locked while a file is replaced or removed

All functions block; they are called in a thread. They raise OSError.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import ELOOP, EMLINK, ENOSYS, ENOTSUP, EOPNOTSUPP, EPERM
from itertools import count
from pathlib import Path
from stat import S_ISREG
from uuid import uuid4

from pipeline.errors import CannotConnect

S_NS = 1_000_000_000

_NO_LINKS = {EMLINK, ENOSYS, ENOTSUP, EOPNOTSUPP, EPERM}
"""What file systems without hard links answer."""


class Busy(Exception):
    """Another process holds the lock."""


class Folder:
    """One process's access to the folder.

    Ages of files are measured with the clock of the file system, which all machines share: that of a file touched at
    this moment. `now_ns`, called in a thread, replaces it, and is then also what files are touched with.
    """

    def __init__(self, path: Path, now_ns: Callable[[], int] | None = None) -> None:
        self.path = path
        self._parts = tuple(path / part for part in ("records", "leases", "objects", "work"))
        self.records, self.leases, self.objects, self.work = self._parts
        self.owner = uuid4().hex
        """The name of this access, unlike that of any other: 32 hexadecimal digits."""
        self._id, self._lock = self.records / ".id", path / "lock"
        self._clock = self.work / f"{self.owner}.clock"
        self._now_ns = now_ns
        self._numbers = count()
        self._device: int | None = None

    def make(self) -> None:
        """Make what is missing; then the folder is another one.

        A folder that was there before and is now on another device is not made again: its disk is not mounted.
        """
        if self._device not in (None, _device_of(self.path)):
            raise OSError(f"{self.path} is not mounted")
        was_whole = self.is_whole
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in self._parts:
            part.mkdir(exist_ok=True)
        if not was_whole:
            self.put(self._id, uuid4().hex.encode())
        os.close(os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o666))
        self._device = self.path.stat().st_dev

    def require(self) -> None:
        """Raise CannotConnect unless all is there that `make` makes."""
        if not self.is_whole:
            if not self.path.is_dir():
                what = f"{self.path} is no folder" if self.path.exists() else f"there is no folder {self.path}"
                raise CannotConnect(what)
            raise CannotConnect(f"no deployment is in the folder {self.path}")

    @property
    def is_whole(self) -> bool:
        """Whether all is there that `make` makes."""
        return all(path.exists() for path in (*self._parts, self._id))

    def identity(self) -> bytes:
        """Return the text of the file `.id`. Raise FileNotFoundError if the folder is gone or was emptied."""
        return self._id.read_bytes()

    def now(self) -> int:
        """Return the time, in nanoseconds since 1970."""
        if self._now_ns is not None:
            return self._now_ns()
        try:
            os.utime(self._clock)
        except FileNotFoundError:
            os.close(os.open(self._clock, os.O_WRONLY | os.O_CREAT, 0o666))
            os.utime(self._clock)
        return self._clock.stat().st_mtime_ns

    def touch(self, path: Path) -> None:
        """Date the file now. It needs no space on the disk."""
        if self._now_ns is None:
            os.utime(path)
        else:
            os.utime(path, ns=(self._now_ns(), self._now_ns()))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from replacing and removing. Raise Busy at once if one of them does.

        The lock ends with its process, however that ends. Raise FileNotFoundError if the folder is gone or was emptied.
        """
        from fcntl import LOCK_EX, LOCK_NB, flock  # not on every system

        self.identity()
        file = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                flock(file, LOCK_EX | LOCK_NB)
            except BlockingIOError as error:
                raise Busy from error
            if not _is_same(file, self._lock):  # removed and made again since it was opened
                raise Busy
            yield
        finally:
            os.close(file)

    def put_new(self, path: Path, content: bytes) -> bool:
        """Make the file, whole. Return False if there is one, or if this file system has no atomic way to tell."""
        part = self._written(content)
        try:
            os.link(part, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return False
        finally:
            part.unlink(missing_ok=True)
        return True

    def put(self, path: Path, content: bytes) -> None:
        """Make or replace the file, whole."""
        part = self._written(content)
        try:
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def new_part(self) -> Path:
        """Return the path of a file that does not exist."""
        return self.work / f"{self.owner}.{next(self._numbers)}"

    def tidy(self, older_than_ns: int) -> None:
        """Remove what crashed processes have left in `work`."""
        with os.scandir(self.work) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False) and entry.stat().st_mtime_ns < older_than_ns:
                        os.unlink(entry.path)

    def leave(self) -> None:
        """Remove the files of this process in `work`."""
        self._clock.unlink(missing_ok=True)

    def _written(self, content: bytes) -> Path:
        part = self.new_part()
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(file, rest) :]
            if self._now_ns is not None:
                self.touch(part)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        return part


def open_regular(path: Path) -> int:
    """Open the file for reading, without waiting. Raise FileNotFoundError, also for what is no regular file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != ELOOP:  # what a symbolic link is answered with
            raise
        raise FileNotFoundError(f"{path} is a link") from error
    if S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise FileNotFoundError(f"{path} is no regular file")


def read_all(file: int, limit_bytes: int) -> bytes:
    """Return the content behind the descriptor, at most one byte more than the limit."""
    parts = []
    while limit_bytes >= 0 and (part := os.read(file, limit_bytes + 1)):
        parts.append(part)
        limit_bytes -= len(part)
    return b"".join(parts)


def _device_of(path: Path) -> int | None:
    """Return the device of the folder, or of the next one above that exists."""
    for one in (path, *path.parents):
        with suppress(FileNotFoundError):
            return one.stat().st_dev
    return None


def _is_same(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
