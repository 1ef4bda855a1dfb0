"""NatsObjects: files in an object store of JetStream.

    file ──► chunks, on a subject of this upload ──► a record under the file's name, which makes them an object

The form is that of every object store of NATS (`nats object ls penstock-objects` lists them).
Source: nats-io/nats-architecture-and-design, ADR-20.
"""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Literal
from uuid import uuid4

import anyio
from anyio import CancelScope, to_thread
from attrs import frozen

from pipeline import InvalidArgument, PenstockError, Unavailable
from pipeline.errors import InvalidMessage
from pipeline.protocols.field_rules import U64
from pipeline.rx import DisposableBase
from pipeline.wire import from_json, to_json

from ..objects import ObjectName, Objects, check_content, name_of
from .broker_connection import NatsConnection
from .broker_session import BrokerSession
from .subjects import token_of

_log = logging.getLogger(__name__)

CHUNK_BYTES = 128 * 1024
"""Bytes of one message, or half of what the server takes, if that is less."""
_TIDY_TIMEOUT_S = 1.0
_RESTORE_SPREAD_S = 5.0
"""Processes that have put the same files look at different times whether they are still there: one sends them again."""


class _Changed(Unavailable):
    """The file is not what it was."""


@frozen
class _Record:
    """An object as the bucket knows it; `nuid` names the upload that its chunks came by."""

    name: str
    bucket: str
    nuid: str
    size: U64
    chunks: U64
    digest: str
    deleted: bool = False


class NatsObjects(Objects):
    """See the module. Objects stay in the bucket until an operator removes them.

    Each message is answered for within the connection's `call_timeout_s`. An upload that breaks off leaves no object,
    and its chunks are removed as soon as there is a connection.
    """

    def __init__(self, connection: NatsConnection, *, bucket: str = "penstock-objects", replicas: int = 1) -> None:
        if token_of(bucket) != bucket:
            raise InvalidArgument("the name of a bucket has letters, digits, - and _", field="bucket")
        self._connection, self._bucket, self._replicas = connection, bucket, replicas
        self._stream = f"OBJ_{bucket}"
        self._ready: BrokerSession | None = None
        self._broken_off: list[tuple[ObjectName, str]] = []
        """Uploads whose chunks may have to be removed."""
        self._own: dict[ObjectName, Path] = {}
        """What this process has put, and from where."""
        self._restoring: DisposableBase | None = None
        self._is_open = False

    async def open(self) -> None:
        """Connect, as `NatsConnection.open` does."""
        await self._connection.open()
        self._is_open = True
        self._restoring = self._connection.scheduler.spawn(self._restored)

    async def close(self) -> None:
        """End what is under way, with Unavailable, if no other part of the process uses the connection."""
        if self._is_open:
            self._is_open = False
            if self._restoring is not None:
                self._restoring.dispose()
            await self._connection.close()

    async def put(self, path: Path) -> ObjectName:
        """See `Objects`. A file that is there already is not sent again.

        What this process has put and is gone after a reconnect is put again, as long as its file is as it was.
        """
        name = await name_of(path)
        await self._put(name, path)
        self._own[name] = path
        return name

    async def get(self, name: ObjectName, target: Path) -> None:
        record, _ = await self._record(name)
        if record is None:
            raise Unavailable(f"there is no object {name.sha256}")
        part = target.with_name(f".{target.name}.{uuid4().hex}.part")
        try:
            async with _opened(part, "xb") as file:
                await self._receive(name, record, file)
            await check_content(name, part)
            await to_thread.run_sync(part.replace, target)
        finally:
            with CancelScope(shield=True):
                await to_thread.run_sync(partial(part.unlink, missing_ok=True))

    # -- inside

    async def _put(self, name: ObjectName, path: Path) -> None:
        while True:
            record, number = await self._record(name)
            if record is not None and (not record.chunks or await self._has_chunks(record)):
                return
            nuid = uuid4().hex
            try:
                chunks = await self._send(path, name, nuid)
                if await self._publish(name, nuid, chunks, number):
                    return
            except BaseException:
                self._broken_off.append((name, nuid))
                with CancelScope(shield=True), suppress(PenstockError):
                    session = self._connection.session_now()
                    with session.call(_TIDY_TIMEOUT_S):
                        await self._tidy(session)
                raise
            async with self._session() as session:  # another process was first
                self._broken_off.append((name, nuid))
                await self._tidy(session)

    async def _restored(self, scope: CancelScope) -> None:
        with scope:
            await self._connection.each_session(self._restore)

    async def _restore(self, _: BrokerSession) -> None:
        """Put again what a server that was away has lost. Called with each session; each process at another time."""
        if self._own:
            await anyio.sleep(self._connection.rng.uniform(0, _RESTORE_SPREAD_S))
        for name, path in list(self._own.items()):
            try:
                await self._put(name, path)
            except OSError as error:
                _log.warning("%s cannot be put again, should it be lost: %s", path, error)
                del self._own[name]
            except _Changed:
                del self._own[name]

    async def _send(self, path: Path, name: ObjectName, nuid: str) -> int:
        """Store the file's chunks. Return their number."""
        digest, chunks = hashlib.sha256(), 0
        async with _opened(path, "rb") as file:
            while True:
                async with self._session() as session:
                    size_bytes = min(CHUNK_BYTES, session.max_payload_bytes // 2)
                if not (chunk := await to_thread.run_sync(file.read, size_bytes)):
                    break
                async with self._session() as session:
                    await session.streams.store(self._chunks_subject(nuid), chunk, {})
                digest.update(chunk)
                chunks += 1
        if digest.hexdigest() != name.sha256:
            raise _Changed(f"{path} has changed while it was put")
        return chunks

    async def _publish(self, name: ObjectName, nuid: str, chunks: int, expected: int) -> bool:
        """Make the chunks an object. Return False if another process has made one since the record of that number."""
        digest = base64.urlsafe_b64encode(bytes.fromhex(name.sha256)).decode()
        record = _Record(name.sha256, self._bucket, nuid, name.size_bytes, chunks, f"SHA-256={digest}")
        async with self._session() as session:
            subject, headers = self._record_subject(name), {"Nats-Rollup": "sub"}
            return await session.streams.store(subject, to_json(record), headers, expected=expected) is not None

    async def _receive(self, name: ObjectName, record: _Record, file: IO[bytes]) -> None:
        """Write the chunks to the file."""
        sequence, left_bytes = 1, name.size_bytes
        while left_bytes > 0:
            async with self._session() as session:
                chunk = await session.streams.after(self._stream, self._chunks_subject(record.nuid), sequence)
            if chunk is None or not chunk.data or len(chunk.data) > left_bytes:
                raise InvalidMessage(f"object {name.sha256} is damaged: {left_bytes} bytes before its end")
            await to_thread.run_sync(file.write, chunk.data)
            sequence, left_bytes = chunk.sequence + 1, left_bytes - len(chunk.data)

    async def _record(self, name: ObjectName) -> tuple[_Record | None, int]:
        """Return the object's record, None if there is no sound one, and the number of the message in its place."""
        async with self._session() as session:
            return await self._record_now(session, name)

    async def _record_now(self, session: BrokerSession, name: ObjectName) -> tuple[_Record | None, int]:
        found = await session.streams.last(self._stream, self._record_subject(name))
        if found is None:
            return None, 0
        try:
            record = from_json(found.data, _Record)
        except InvalidArgument:
            return None, found.sequence
        is_sound = token_of(record.nuid) == record.nuid and not record.deleted
        return record if is_sound else None, found.sequence

    async def _has_chunks(self, record: _Record) -> bool:
        async with self._session() as session:
            return await session.streams.last(self._stream, self._chunks_subject(record.nuid)) is not None

    def _chunks_subject(self, nuid: str) -> str:
        return f"$O.{self._bucket}.C.{nuid}"

    def _record_subject(self, name: ObjectName) -> str:
        return f"$O.{self._bucket}.M.{base64.urlsafe_b64encode(name.sha256.encode()).decode()}"

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[BrokerSession]:
        """Give the present session, or the next one, with the bucket in it, all within the time of one call."""
        async with self._connection.calling() as session:
            if self._ready is not session:
                await self._ensure(session)
                await self._tidy(session)
                self._ready = session
            try:
                yield session
            except BaseException:
                self._ready = None  # whatever it was, the bucket is looked for again
                raise

    async def _tidy(self, session: BrokerSession) -> None:
        """Remove the chunks of uploads that broke off, unless they became an object: the answer may have been lost."""
        while self._broken_off:
            name, nuid = self._broken_off.pop()
            try:
                record, _ = await self._record_now(session, name)
                if record is None or record.nuid != nuid:
                    await session.streams.purge(self._stream, self._chunks_subject(nuid))
            except BaseException:
                self._broken_off.append((name, nuid))
                raise

    async def _ensure(self, session: BrokerSession) -> None:
        settings = {
            "name": self._stream,
            "subjects": [f"$O.{self._bucket}.{kind}.>" for kind in "CM"],
            "allow_direct": True,
            "allow_rollup_hdrs": True,
            "num_replicas": self._replicas,
        }
        await session.streams.ensure_stream(settings)


@asynccontextmanager
async def _opened(path: Path, mode: Literal["rb", "xb"]) -> AsyncIterator[IO[bytes]]:
    """Open the file and close it at the end, whatever ends the block."""

    def opened() -> IO[bytes]:
        return path.open(mode)

    file = await to_thread.run_sync(opened)
    try:
        yield file
    finally:
        with CancelScope(shield=True):
            await to_thread.run_sync(file.close)
