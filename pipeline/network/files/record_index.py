"""What the files of a folder say: which keys are alive, and how they are written, renewed and removed.

    every look:             id, clock, the records' folder's own modification time
    that has changed:       names and times of all records; those that changed are read
    now and then:           the times of all leases, and of all records

All functions block, are called in a thread, one at a time, and raise OSError if the folder cannot be used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from stat import S_ISREG
from typing import TypeAlias

from attrs import evolve, frozen

from pipeline.errors import InvalidMessage

from ..discovery import Put, Written
from .folder import S_NS, Busy, Folder, open_regular, read_all
from .leases import Leases
from .stored import FILE_MAX_BYTES, Stored, decode_stored, encode_stored, file_name

_log = logging.getLogger(__name__)

_LEASE_LOOKS, _RECORD_LOOKS = 10, 2
"""How often a time to live the leases are looked at, and the records even if nothing seems to have changed."""
_LEFTOVERS_NS = 600 * S_NS
"""Age of files in `work` that no process needs any more."""

_Stamp: TypeAlias = tuple[int, int, int]


@frozen
class _File:
    """A file as it was read last. It is replaced, never changed."""

    stamp: _Stamp
    """Inode, modification time and size."""
    is_settled: bool
    """Whether a replacement since then has another stamp for certain."""
    is_damaged: bool
    stored: Stored | None
    """None for what has never been a record. A record that was damaged is kept."""


@frozen
class _Look:
    """When the folder was looked at last, by its clock and by the process's, and which folder it was."""

    folder_ns: int
    process_ns: int
    identity: bytes


@frozen
class View:
    """The keys that are alive. A later view has a higher version, if it differs."""

    version: int
    alive: Mapping[str, Put]


class LeaseLapsed(Exception):
    """Nothing was written, because the lease of this process has run out: it is to be renewed before."""


class RecordIndex:
    """The records of one folder, as one process sees them. A key is alive while the lease of its writer is.

    While the folder could not be looked at, the process stood still or a clock was set, renewals may have gone unseen:
    then no key that is known is given up for another `ttl_ns`.
    """

    def __init__(self, folder: Folder, ttl_ns: int) -> None:
        self._folder, self._ttl_ns = folder, ttl_ns
        self._leases = Leases(folder, ttl_ns)
        self._files: dict[str, _File] = {}
        self._valid: set[str] = set()
        """The writers whose leases were valid at the last look."""
        self._alive: dict[str, Put] = {}
        self._version = 0
        self._look: _Look | None = None
        self._listed_ns = self._leases_ns = self._changed_ns = 0
        self._steady_since_ns = self._keeps_expired_ns = self._keeps_missing_ns = 0
        """Since when no look was missed; until when known keys stay alive whose leases ran out, or that are missing."""
        self._own_stamps: dict[str, _Stamp] = {}

    @property
    def view(self) -> View:
        return View(self._version, self._alive)

    def forget(self) -> None:
        """Begin anew: the next look counts as the first one. What was read is not read again."""
        self._look = None
        self._set_alive({})

    def look(self, process_ns: int, beginning: str = "") -> View:
        """Return what is alive now. `process_ns` is a clock of this process, not that of the file system.

        `beginning`, for a first look only: of the names of the files that matter.
        """
        identity, now_ns = self._folder.identity(), self._folder.now()
        is_first = self._look is None
        self._notice_interruption(_Look(now_ns, process_ns, identity))
        changed_ns = self._folder.records.stat().st_mtime_ns
        has_changed = changed_ns != self._changed_ns or now_ns - changed_ns <= _time_step_ns(changed_ns)
        if lists := is_first or has_changed or self._is_due(self._listed_ns, now_ns, _RECORD_LOOKS):
            self._list(now_ns, beginning)
            self._listed_ns, self._changed_ns = now_ns, changed_ns
        if is_due := is_first or self._is_due(self._leases_ns, now_ns, _LEASE_LOOKS):
            self._leases.look()
            self._leases_ns = now_ns
        if lists or is_due:
            writers = {file.stored.writer for file in self._files.values() if file.stored is not None}
            self._valid = {writer for writer in writers if self._leases.is_known_valid(writer, now_ns)}
            self._set_alive(self._living(now_ns))
        return self.view

    def sweep(self) -> None:
        """Remove the files of processes whose lease has run out, unless another process is about to write.

        An error is no matter: what has run out is gone all the same.
        """
        if self._look is None or (now_ns := self._look.folder_ns) - self._steady_since_ns < self._ttl_ns:
            return
        dead = {
            name: file.stored.writer
            for name, file in self._files.items()
            if file.stored is not None and file.stored.writer not in self._valid and not file.is_damaged
        }
        leases = self._leases.expired(now_ns)
        if not dead and not leases:
            return
        try:
            with self._folder.locked():
                now_ns = self._folder.now()
                expired = {owner for owner in {*dead.values(), *leases} if not self._leases.is_valid(owner, now_ns)}
                for name, writer in dead.items():
                    if writer in expired and (found := self._read(name)) is not None and found.writer == writer:
                        (self._folder.records / name).unlink(missing_ok=True)
                for owner in expired:
                    self._leases.remove(owner)
        except (Busy, OSError):
            return  # perhaps the files of another user

    def tidy(self) -> None:
        """Remove what crashed processes have left in `work`."""
        self._folder.tidy(self._folder.now() - _LEFTOVERS_NS)

    # -- single keys

    def get(self, key: str) -> Put | None:
        """Return the value of a key that is alive."""
        found = self._read_live(file_name(key))
        return None if found is None else found.put

    def create(self, put: Put) -> Written:
        """Write the key unless one lives."""
        name, content = file_name(put.key), encode_stored(Stored(put, self._folder.owner))
        self._hold_lease()
        if not self._folder.put_new(self._folder.records / name, content):
            with self._folder.locked():
                if (found := self._read_live(name)) is not None:
                    return Written("exists", found.put.revision)
                self._folder.put(self._folder.records / name, content)
        return self._wrote(name, put)

    def replace(self, put: Put, revision: int) -> Written:
        """Write the key if it lives with that revision."""
        name, content = file_name(put.key), encode_stored(Stored(put, self._folder.owner))
        self._hold_lease()
        with self._folder.locked():
            if (found := self._read_live(name)) is None:
                return Written("missing")
            if found.put.revision != revision:
                return Written("retry", found.put.revision)
            self._folder.put(self._folder.records / name, content)
        return self._wrote(name, put)

    def delete(self, key: str) -> None:
        path = self._folder.records / file_name(key)
        if path.exists():
            with self._folder.locked():
                path.unlink(missing_ok=True)
        self._removed(path.name)

    def drop(self, put: Put) -> None:
        """Remove the key if this process still has it, as it was written then."""
        name = file_name(put.key)
        with self._folder.locked():
            found = self._read(name)
            if found is None or (found.writer, found.put.revision) != (self._folder.owner, put.revision):
                return
            (self._folder.records / name).unlink(missing_ok=True)
        self._removed(name)

    # -- this process's keys

    def renew(self, own: Mapping[str, Put]) -> dict[str, Put | None]:
        """Renew the lease. Return which of these keys changed: None where another process has deleted or written it,
        and what a write of this process has left whose result it did not wait for.

        What was lost with a lease that ran out, or with the folder, is written again; a damaged file is, too.
        """
        if not own and not self._leases.was_taken:
            return {}
        identity, now_ns = self._identity_made(), self._folder.now()
        found: dict[str, Put | None] = {}
        damaged: list[str] = []
        if is_held := self._leases.renew(now_ns, identity):
            for key, put in own.items():
                try:
                    found[key] = self._checked(put)
                except InvalidMessage:
                    damaged.append(key)
        if damaged or not is_held:
            with self._folder.locked():  # no process removes them at this moment
                self._leases.take(now_ns, identity)
                found.update((key, self._restored(own[key])) for key in (damaged if is_held else own))
        return {key: put for key, put in found.items() if put != own[key]}

    def leave(self, own: Iterable[str]) -> None:
        """End the lease and remove these keys, as far as no other process has written them."""
        self._leases.give_up()
        self._folder.leave()
        with self._folder.locked():
            for name in map(file_name, own):
                if (found := self._read(name)) is not None and found.writer == self._folder.owner:
                    (self._folder.records / name).unlink(missing_ok=True)
                self._removed(name)

    def _hold_lease(self) -> None:
        """Have a lease before a key. Raise LeaseLapsed if it ran out: `renew` restores the keys it had, too."""
        identity, now_ns = self._identity_made(), self._folder.now()
        if self._leases.renew(now_ns, identity):
            return
        if self._leases.was_taken:
            raise LeaseLapsed
        self._leases.take(now_ns, identity)

    def _checked(self, put: Put) -> Put | None:
        """Return what the key of this process holds now, None if it is gone or another's. A file that is as it was is
        not read. Raise InvalidMessage if it is damaged."""
        name = file_name(put.key)
        try:
            stat = (self._folder.records / name).lstat()
            stamp = _stamp(stat)
            if self._own_stamps.get(name) == stamp:
                return put
            found = decode_stored(name, self._content(name, stat.st_size))
        except FileNotFoundError:
            self._own_stamps.pop(name, None)
            return None
        if found.writer != self._folder.owner:
            return None
        self._own_stamps[name] = stamp
        return found.put

    def _restored(self, put: Put) -> Put | None:
        """Write the key again if it is gone; None if another process has it. Called with the lock."""
        name = file_name(put.key)
        if (found := self._read(name)) is not None and found.writer == self._folder.owner:
            return found.put
        if self._read_live(name) is not None:
            return None
        self._folder.put(self._folder.records / name, encode_stored(Stored(put, self._folder.owner)))
        self._wrote(name, put)
        return put

    def _identity_made(self) -> bytes:
        if not self._folder.is_whole:
            self._folder.make()
        return self._folder.identity()

    def _wrote(self, name: str, put: Put) -> Written:
        """Take a write of this process for known: its own watches see it at once."""
        self._files[name] = _File((0, 0, 0), False, False, Stored(put, self._folder.owner))  # the next look reads it
        self._valid.add(self._folder.owner)
        self._set_alive({**self._alive, put.key: put})
        return Written("created", put.revision)

    def _removed(self, name: str) -> None:
        file = self._files.pop(name, None)
        self._own_stamps.pop(name, None)
        if file is not None and file.stored is not None:
            self._set_alive({key: put for key, put in self._alive.items() if key != file.stored.put.key})

    # -- looking

    def _is_due(self, last_ns: int, now_ns: int, times: int) -> bool:
        return not 0 <= now_ns - last_ns < self._ttl_ns // times

    def _notice_interruption(self, look: _Look) -> None:
        """Keep what is known for a while if renewals may have gone unseen since the last look."""
        last, self._look = self._look, look
        if last is None:
            self._steady_since_ns, self._keeps_expired_ns, self._keeps_missing_ns = look.folder_ns, 0, 0
            return
        passed_ns = look.process_ns - last.process_ns
        drift_ns = abs(look.folder_ns - last.folder_ns - passed_ns)
        is_another = look.identity != last.identity
        if is_another or max(passed_ns, drift_ns) >= self._ttl_ns // 2:
            self._steady_since_ns, self._keeps_expired_ns = look.folder_ns, look.folder_ns + self._ttl_ns
        if is_another:
            self._keeps_missing_ns = look.folder_ns + self._ttl_ns

    def _list(self, now_ns: int, beginning: str) -> None:
        files: dict[str, _File] = {}
        with os.scandir(self._folder.records) as entries:
            for entry in entries:
                if entry.name.startswith(".") or not entry.name.startswith(beginning):
                    continue
                try:
                    found = self._looked_at(entry.name, entry.stat(follow_symlinks=False), now_ns)
                except FileNotFoundError:
                    continue
                if found is not None:
                    files[entry.name] = found
        for name in self._files.keys() - files.keys():  # a listing during changes may leave out what is there
            if not name.startswith(beginning):
                continue
            try:
                again = self._looked_at(name, (self._folder.records / name).lstat(), now_ns)
            except FileNotFoundError:
                again = self._files[name] if now_ns < self._keeps_missing_ns else None
            if again is not None:
                files[name] = again
        self._files = files

    def _living(self, now_ns: int) -> dict[str, Put]:
        keeps = now_ns < self._keeps_expired_ns
        return {
            file.stored.put.key: file.stored.put
            for file in self._files.values()
            if file.stored is not None
            and (file.stored.writer in self._valid or (keeps and file.stored.put.key in self._alive))
        }

    def _looked_at(self, name: str, stat: os.stat_result, now_ns: int) -> _File | None:
        """Return the file as it is now, None for what is no file. A file that has not changed is not read."""
        if not S_ISREG(stat.st_mode):
            return None
        stamp, known = _stamp(stat), self._files.get(name)
        if known is not None and known.is_settled and known.stamp == stamp:
            return known
        is_settled = now_ns - stat.st_mtime_ns > _time_step_ns(stat.st_mtime_ns)
        try:
            return _File(stamp, is_settled, False, decode_stored(name, self._content(name, stat.st_size)))
        except FileNotFoundError:
            raise
        except (InvalidMessage, OSError) as error:
            if known is None or not known.is_damaged:
                _log.warning("passing over the file %s: %s", self._folder.records / name, error)
            before = known or _File(stamp, is_settled, True, None)
            is_settled = is_settled and isinstance(error, InvalidMessage)
            return evolve(before, stamp=stamp, is_settled=is_settled, is_damaged=True)

    def _set_alive(self, alive: dict[str, Put]) -> None:
        if alive != self._alive:
            self._alive = alive
            self._version += 1

    # -- files

    def _content(self, name: str, size_bytes: int) -> bytes:
        if size_bytes > FILE_MAX_BYTES:
            raise InvalidMessage(f"{size_bytes} bytes")
        opened = open_regular(self._folder.records / name)
        try:
            return read_all(opened, FILE_MAX_BYTES)
        finally:
            os.close(opened)

    def _read(self, name: str) -> Stored | None:
        """Return the record in the file, None if there is none."""
        try:
            return decode_stored(name, self._content(name, (self._folder.records / name).lstat().st_size))
        except (FileNotFoundError, InvalidMessage):
            return None

    def _read_live(self, name: str) -> Stored | None:
        """Return the record in the file; None if there is none or the lease of its writer has run out."""
        found = self._read(name)
        return found if found is not None and self._leases.is_valid(found.writer, self._folder.now()) else None


def _stamp(stat: os.stat_result) -> _Stamp:
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _time_step_ns(date_ns: int) -> int:
    """Return how long after that date a file may change again without another date: dates go in steps, those of some
    file systems in steps of seconds."""
    return S_NS // 10 if date_ns % S_NS else 2 * S_NS
