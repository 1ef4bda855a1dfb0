"""The machine that this process runs on, as far as files can be shared on it."""

from __future__ import annotations

import hashlib
import os
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path


@cache
def machine_id() -> str:
    """Return a text that processes have in common exactly if they see the same files on the same running machine.

    That is the machine's boot and the mount namespace, hashed: containers of one host differ in the second.
    """
    parts = [socket.gethostname()]
    with suppress(OSError):  # no Linux
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/mnt")]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]
