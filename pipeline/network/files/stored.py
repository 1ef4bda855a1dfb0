"""A key as a file: its name, and its content.

v1/instances/ns/comp/ep/1a  ──►  records/v1%2finstances%2fns%2fcomp%2fep%2f1a

{"key": "v1/instances/ns/comp/ep/1a", "revision": 7, "writer": "5d0c...", "size_bytes": 212}    one line of JSON
...the value
"""

from __future__ import annotations

import re
from hashlib import sha256

from attrs import frozen

from pipeline.errors import InvalidArgument, InvalidMessage, MessageTooLarge
from pipeline.protocols.field_rules import U64
from pipeline.wire import from_json, to_json

from ..discovery import Put

VALUE_MAX_BYTES = 8 * 1024 * 1024
"""Bytes of a value. A larger file among the records is not read."""

FILE_MAX_BYTES = VALUE_MAX_BYTES + 64 * 1024

_NAME_MAX_BYTES = 200
"""Most file systems allow 255."""
_NAME_KEPT_BYTES = 120
"""What is kept of a longer name, before the sum of the key."""

_OTHERS = re.compile(rb"[^a-z0-9_-]")
_WRITER = re.compile(r"[0-9a-f]{32}")


@frozen
class Stored:
    """What one file holds."""

    put: Put
    writer: str
    """The store that wrote it, whose lease is its lease: the owner of a `Folder`."""


@frozen
class _Header:
    key: str
    revision: U64
    writer: str
    size_bytes: U64


def file_name(key: str) -> str:
    """Return the name of the key's file: escaped by percent signs, or cut, with a sum of the key.

    Capitals are escaped as well, for file systems that take them for small letters. Raise InvalidArgument for an empty
    key and for one that is no Unicode text.
    """
    if not (escaped := _escaped(key)):
        raise InvalidArgument("a key must not be empty", field="key")
    if len(escaped) > _NAME_MAX_BYTES:  # a dot is in no shorter name
        return f"{escaped[:_NAME_KEPT_BYTES]}.{sha256(key.encode()).hexdigest()}"
    return escaped


def name_beginning(prefix: str) -> str:
    """Return what the names of all files below the prefix begin with; others may, too."""
    return _escaped(prefix)[:_NAME_KEPT_BYTES]


def _escaped(text: str) -> str:
    try:
        return _OTHERS.sub(lambda found: b"%%%02x" % found[0][0], text.encode()).decode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"a key must be Unicode text, found {text!r}", field="key") from error


def encode_stored(stored: Stored) -> bytes:
    """Return the content of the file. Raise MessageTooLarge if the value is."""
    put = stored.put
    if len(put.value) > VALUE_MAX_BYTES:
        raise MessageTooLarge(f"the value of {put.key} has {len(put.value)} bytes, more than {VALUE_MAX_BYTES}")
    return to_json(_Header(put.key, put.revision, stored.writer, len(put.value))) + b"\n" + put.value


def decode_stored(name: str, content: bytes) -> Stored:
    """Return what the file of that name holds. Raise InvalidMessage if it is incomplete or not ours."""
    line, _, value = content.partition(b"\n")
    try:
        header = from_json(line, _Header)
        expected = file_name(header.key)
    except InvalidArgument as error:
        raise InvalidMessage(f"not a record: {error}") from error
    if expected != name:
        raise InvalidMessage(f"the record of {header.key} in the file of another key")
    if not _WRITER.fullmatch(header.writer):  # it becomes the name of a file
        raise InvalidMessage(f"no process is named {header.writer[:80]!r}")
    if len(value) != header.size_bytes:
        raise InvalidMessage(f"{len(value)} of {header.size_bytes} bytes")
    return Stored(Put(header.key, value, header.revision), header.writer)
