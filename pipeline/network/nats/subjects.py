"""Text as tokens of NATS subjects, and back.

    key    v1/instances/ns/comp/ep/1f   ──►  v1.instances.ns.comp.ep.1f
    part   a.b c                        ──►  a=2Eb=20c

A token keeps letters, digits, `-` and `_`; every other byte of its UTF-8 form is `=XX`, and the empty part is `=`. So
no two texts share a token, and keys are valid for every tool that reads KV buckets. What does not fit into a subject
ends in `=K` and the SHA-256 of the whole key, which is then a header of its value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from urllib.parse import quote, unquote

from pipeline import InvalidArgument
from pipeline.errors import InvalidMessage

from ..events import Scope

SUBJECT_BYTES_MAX = 1024
"""A server ends the connection of a client that sends a line of 4 kB."""
KEY_BYTES_MAX = 16 * 1024
"""Longer keys are refused."""
_KEY_HEADER, _HASHED = "Penstock-Key", "=K"
_HASHED_BYTES = len(f".{_HASHED}") + 64

_UNSAFE = re.compile(rb"[^A-Za-z0-9_-]")
_TOKEN = re.compile(r"(?:[A-Za-z0-9_-]|=[0-9A-F]{2})+")
_ESCAPE = re.compile(r"=([0-9A-F]{2})")
_EMPTY = "="


def token_of(text: str) -> str:
    """Return the text as one token."""
    return _UNSAFE.sub(lambda found: b"=%02X" % found[0][0], _bytes(text)).decode("ascii") or _EMPTY


def text_of(token: str) -> str:
    """Return the text of a token. Raise InvalidMessage for one that `token_of` never returns."""
    if token == _EMPTY:
        return ""
    if _TOKEN.fullmatch(token):
        data = _ESCAPE.sub(lambda found: chr(int(found[1], 16)), token).encode("latin-1")
        try:
            text = data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            pass
        else:
            if token_of(text) == token:
                return text
    raise InvalidMessage(f"{token[:100]!r} is no token of a key")


def key_subject(root: str, key: str) -> str:
    """Return the subject of a key in a bucket. Raise InvalidArgument for a key of more than `KEY_BYTES_MAX`."""
    tokens = _tokens(key)
    subject = ".".join([root, *tokens])
    if len(subject) <= SUBJECT_BYTES_MAX:
        return subject
    return f"{_stem(root, tokens)}.{_HASHED}{sha256(_bytes(key)).hexdigest()}"


def key_headers(subject: str, key: str) -> dict[str, str]:
    """Return what the value of the key needs so that `key_of` finds the key."""
    return {_KEY_HEADER: quote(_bytes(key), safe="")} if is_hashed(subject) else {}


def is_hashed(subject: str) -> bool:
    """Return whether the subject does not hold the whole key."""
    return subject.rpartition(".")[2].startswith(_HASHED)


def key_of(root: str, subject: str, headers: Mapping[str, str]) -> str:
    """Return the key of a value in a bucket. Raise InvalidMessage for what `key_subject` never returns."""
    if not subject.startswith(f"{root}."):
        raise InvalidMessage(f"{subject[:100]!r} is no subject of {root}")
    if not is_hashed(subject):
        return "/".join(text_of(token) for token in subject[len(root) + 1 :].split("."))
    try:
        key = unquote(headers.get(_KEY_HEADER, ""), errors="surrogatepass")
        if key_subject(root, key) == subject:
            return key
    except (UnicodeError, InvalidArgument):
        pass
    raise InvalidMessage(f"{subject[:100]!r} comes without its key")


def prefix_subjects(root: str, prefix: str) -> list[str]:
    """Return the subjects that match the key of the prefix and every key below it; all keys for the empty prefix.

    For a long prefix they match other keys, too.
    """
    if not prefix:
        return [f"{root}.>"]
    tokens = _tokens(prefix.removesuffix("/"))
    subject, stem = ".".join([root, *tokens]), _stem(root, tokens)
    return [subject, f"{subject}.>"] if subject == stem else [f"{stem}.>"]


def _tokens(key: str) -> list[str]:
    if len(_bytes(key)) > KEY_BYTES_MAX:
        raise InvalidArgument(f"{key[:100]!r}... is a key of more than {KEY_BYTES_MAX} bytes")
    return [token_of(part) for part in key.split("/")]


def _stem(root: str, tokens: list[str]) -> str:
    """Return as many tokens as leave room for the sum of a key."""
    stem = root
    for token in tokens:
        if len(stem) + 1 + len(token) + _HASHED_BYTES > SUBJECT_BYTES_MAX:
            break
        stem = f"{stem}.{token}"
    return stem


def event_subject(scope: Scope, topic: str) -> str:
    """Return `namespace.<ns>.component.<c>.endpoint.<e>.<topic>`, without the parts that the scope lacks.

    Raise InvalidArgument for one that is too long. Source: dynamo lib/runtime/src/transports/event_plane.
    """
    parts = ["namespace", token_of(scope.namespace)]
    if scope.component is not None:
        parts += ["component", token_of(scope.component)]
    if scope.endpoint is not None:
        parts += ["endpoint", token_of(scope.endpoint)]
    return _checked(".".join([*parts, token_of(topic)]))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _checked(subject: str) -> str:
    """Return the subject itself. Raise InvalidArgument if it is too long."""
    if len(subject) > SUBJECT_BYTES_MAX:
        raise InvalidArgument(f"{subject[:100]}... has {len(subject)} bytes, more than {SUBJECT_BYTES_MAX}")
    return subject
