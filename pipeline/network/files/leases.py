"""Leases: one file for each store that has keys, touched while its process runs. Its age is that of all its keys.

All functions block, are called in a thread, one at a time, and raise OSError if the folder cannot be used.
"""

from __future__ import annotations

import os
from contextlib import suppress

from .folder import Folder, open_regular


class Leases:
    """The leases of one folder, as one process sees them; `ttl_ns` is how long one is valid after a touch."""

    def __init__(self, folder: Folder, ttl_ns: int) -> None:
        self._folder, self._ttl_ns = folder, ttl_ns
        self._touched: dict[str, int] = {}
        """When each lease was touched last, as far as is known."""
        self._renewed: tuple[int, bytes] | None = None
        """When this process's lease was renewed last, in which folder."""

    @property
    def was_taken(self) -> bool:
        """Whether this process has or had a lease."""
        return self._renewed is not None

    def renew(self, now_ns: int, identity: bytes) -> bool:
        """Touch this process's lease. Return False if it has run out: it is to be taken anew, with the lock."""
        if self._renewed is None:
            return False
        renewed_ns, renewed_identity = self._renewed
        if identity != renewed_identity or abs(now_ns - renewed_ns) > self._ttl_ns:
            return False
        try:
            self._folder.touch(self._folder.leases / self._folder.owner)
        except FileNotFoundError:
            return False
        self._renewed = now_ns, identity
        return True

    def take(self, now_ns: int, identity: bytes) -> None:
        """Make this process's lease, or touch it."""
        path = self._folder.leases / self._folder.owner
        try:
            self._folder.touch(path)
        except FileNotFoundError:
            self._folder.put(path, b"")
        self._renewed = now_ns, identity

    def give_up(self) -> None:
        """End this process's lease: its keys are gone for all others."""
        self._renewed = None
        (self._folder.leases / self._folder.owner).unlink(missing_ok=True)

    def look(self) -> None:
        """Look at all leases."""
        touched: dict[str, int] = {}
        with os.scandir(self._folder.leases) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    touched[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
        self._touched = touched

    def is_known_valid(self, owner: str, now_ns: int) -> bool:
        """Return whether the lease is valid, as seen at the last look; one that is not is looked at again."""
        return self._is_fresh(owner, now_ns) or self.is_valid(owner, now_ns)

    def is_valid(self, owner: str, now_ns: int) -> bool:
        """Look at this lease alone. It is opened for that, which passes the caches of a network file system."""
        try:
            opened = open_regular(self._folder.leases / owner)
        except FileNotFoundError:
            self._touched.pop(owner, None)
            return False
        except PermissionError:
            return self._is_fresh(owner, now_ns)
        try:
            self._touched[owner] = os.fstat(opened).st_mtime_ns
        finally:
            os.close(opened)
        return self._is_fresh(owner, now_ns)

    def remove(self, owner: str) -> None:
        """Remove a lease that has run out."""
        (self._folder.leases / owner).unlink(missing_ok=True)

    def expired(self, now_ns: int) -> set[str]:
        """Return the leases seen at the last look that had run out."""
        return {owner for owner, touched_ns in self._touched.items() if now_ns - touched_ns > self._ttl_ns}

    def _is_fresh(self, owner: str, now_ns: int) -> bool:
        touched_ns = self._touched.get(owner)
        return touched_ns is not None and abs(now_ns - touched_ns) <= self._ttl_ns
