"""Tls: a server's certificate, changed without a restart."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from pipeline import InvalidArgument

from .watched_file import WatchedFiles

CERT_FIELD, KEY_FIELD = "tls_cert_path", "tls_key_path"


class Tls:
    """TLS 1.2 or later with the certificate chain and the key in two PEM files.

    `context` is for a listener. After a change of the files in `watched`, new connections use the new certificate and
    open ones go on; a pair that does not work is logged, and the former one stays in use. Raise InvalidArgument that
    names the option for files that cannot be used at the start.
    """

    def __init__(self, cert_path: Path, key_path: Path) -> None:
        self._paths = cert_path, key_path
        self.watched = WatchedFiles("TLS certificate", self._paths, self._load)
        self.context = self._current = _context(cert_path, key_path)
        # Loading a pair into a context in use can leave it with the certificate of one pair and the key of another. So
        # each pair has a context of its own, which a connection gets when its handshake begins.
        self.context.sni_callback = self._choose

    def _load(self) -> Callable[[], object]:
        changed = _context(*self._paths)
        return lambda: setattr(self, "_current", changed)

    def _choose(self, connection: ssl.SSLSocket | ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        """Called in each handshake, even if the client names no host."""
        connection.context = self._current


def tls_of(cert_path: Path | None, key_path: Path | None) -> Tls | None:
    """Return the TLS of the two options, None if neither is set. Raise InvalidArgument for only one of them."""
    if cert_path is None and key_path is None:
        return None
    if cert_path is None:
        raise InvalidArgument("is needed with --tls-key-path", field=CERT_FIELD)
    if key_path is None:
        raise InvalidArgument("is needed with --tls-cert-path", field=KEY_FIELD)
    return Tls(cert_path, key_path)


def _context(cert_path: Path, key_path: Path) -> ssl.SSLContext:
    _check_pem(cert_path, b"-----BEGIN CERTIFICATE-----", "certificate", CERT_FIELD)
    _check_pem(key_path, b"PRIVATE KEY-----", "private key", KEY_FIELD)

    def refuse() -> NoReturn:  # without it OpenSSL reads a passphrase from the terminal
        raise InvalidArgument(
            f"{key_path}: is locked with a passphrase; the server needs a key without", field=KEY_FIELD
        )

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert_path, key_path, refuse)
    except (OSError, ValueError) as error:
        what = getattr(error, "reason", None) or str(error)
        raise InvalidArgument(f"{key_path} does not go with {cert_path}: {what}", field=KEY_FIELD) from error
    return context


def _check_pem(path: Path, mark: bytes, what: str, field: str) -> None:
    try:
        holds = mark in path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{path}: cannot be read: {error.strerror or error}", field=field) from error
    except ValueError as error:  # a path with a zero byte
        raise InvalidArgument(f"{str(path)!r} is no path: {error}", field=field) from error
    if not holds:
        raise InvalidArgument(f"{path}: holds no {what} in PEM form", field=field)
