"""PortShares: how many connections each process that shares a port has, for all of them to see.

A file of one number for each process, which all map into their memory; nothing is locked, for each writes its own.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Self

PORT_SHARES = "PENSTOCK_PORT_SHARES"
"""Variable with the number of this process and the path of the file, a colon between; set by the process above."""

ABSENT = 2**32 - 1
"""In the place of a count: there is no such process now."""
_BYTES = 4


class PortShares:
    """The counts of all processes, and which of them is this one's. Raise OSError if there is no such file."""

    def __init__(self, path: Path, number: int) -> None:
        self._number = number
        with path.open("r+b") as file:
            self._counts = memoryview(mmap.mmap(file.fileno(), 0)).cast("I")

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """Return those that the environment names; None without."""
        number, _, path = environment.get(PORT_SHARES, "").partition(":")
        return cls(Path(path), int(number)) if number.isdecimal() and path else None

    @staticmethod
    def make(path: Path, processes: int) -> None:
        """Write the file for so many processes, none of which is there yet."""
        path.write_bytes(ABSENT.to_bytes(_BYTES, "little") * processes)

    def set(self, connections: int) -> None:
        """Write the count of this process; `ABSENT` when it takes no more connections."""
        self._counts[self._number] = connections

    def part(self, connections: int, waiting: int) -> int:
        """Return how many of the connections that wait are for this process, which has so many.

        All processes then have the same number, or those with fewer as many as they can get. One that is left over is
        for each of those that could take it: the first one has it.
        """
        others = (count for at, count in enumerate(self._counts) if at != self._number and count != ABSENT)
        together, level = waiting, 0
        for processes, count in enumerate(sorted((connections, *others)), 1):
            if processes > 1 and level <= count:
                break
            together += count
            level = -(-together // processes)
        return min(max(0, level - connections), waiting)
