"""Objects: files that travel between the processes of a deployment, such as a model's tokenizer.

    worker ──► put(path) ──► name    (in the model's card)    ──► get(name, target) ──► front end

An object is named by its content, so it never changes, and the same file of many workers is stored once.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path

from anyio import to_thread
from anyio.lowlevel import checkpoint
from attrs import frozen

from pipeline import Unavailable
from pipeline.errors import InvalidMessage
from pipeline.loop import time_held
from pipeline.protocols.field_rules import U64

READ_BYTES = 1024 * 1024
"""Bytes that are read and written at a time."""


@frozen
class ObjectName:
    """The content of an object: its name wherever it is stored."""

    sha256: str
    """In hex."""
    size_bytes: U64


class Objects(ABC):
    """Objects by their names, seen by every process of a deployment. No call waits for ever."""

    async def open(self) -> None:
        """Connect. Called once, before anything else."""
        await checkpoint()

    @abstractmethod
    async def put(self, path: Path) -> ObjectName:
        """Store the content of the file. Return its name. Raise OSError if it cannot be read, and Unavailable."""

    @abstractmethod
    async def get(self, name: ObjectName, target: Path) -> None:
        """Write the object to a new file. Other readers of the folder never see a part of it.

        Raise Unavailable if there is no such object, or if it cannot be fetched, InvalidMessage if its content is not
        what the name states, and OSError if it cannot be written. In all of these there is no file.
        """

    async def close(self) -> None:
        """End what is under way. Objects stay."""
        await checkpoint()


class InProcessObjects(Objects):
    """Objects of one process, in memory."""

    def __init__(self) -> None:
        self._contents: dict[ObjectName, bytes] = {}

    async def put(self, path: Path) -> ObjectName:
        with time_held():
            content = await to_thread.run_sync(path.read_bytes)
            name = await to_thread.run_sync(_name_of_bytes, content)
        self._contents[name] = content
        return name

    async def get(self, name: ObjectName, target: Path) -> None:
        if (content := self._contents.get(name)) is None:
            raise Unavailable(f"there is no object {name.sha256}")
        with time_held():
            await to_thread.run_sync(_write_whole, target, content)


async def name_of(path: Path) -> ObjectName:
    """Return the name of a file's content. Raise OSError if it cannot be read."""
    with time_held():
        return await to_thread.run_sync(_name_of, path)


async def check_content(name: ObjectName, path: Path) -> None:
    """Raise InvalidMessage unless the file has the content that the name states."""
    found = await name_of(path)
    if found != name:
        text = f"{found.size_bytes} bytes with the sum {found.sha256}, not {name.size_bytes} with {name.sha256}"
        raise InvalidMessage(f"an object came with {text}")


def _name_of_bytes(content: bytes) -> ObjectName:
    return ObjectName(hashlib.sha256(content).hexdigest(), len(content))


def _name_of(path: Path) -> ObjectName:
    size_bytes, digest = 0, hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(READ_BYTES):
            digest.update(part)
            size_bytes += len(part)
    return ObjectName(digest.hexdigest(), size_bytes)


def _write_whole(target: Path, content: bytes) -> None:
    part = target.with_name(f".{target.name}.part")
    try:
        part.write_bytes(content)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
