"""TLS of a request plane: the certificate of this process, and which ones it trusts."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NoReturn, Self

from attrs import frozen

from pipeline import InvalidArgument

from .options import TcpOptions


@frozen
class TlsContexts:
    """For connections that this process makes, and for those it accepts. TLS 1.2 or later."""

    caller: ssl.SSLContext
    worker: ssl.SSLContext

    @classmethod
    def of(cls, options: TcpOptions) -> Self | None:
        """Return the contexts, None without a certificate. Raise InvalidArgument that names the file that is wrong."""
        cert_path, key_path, ca_path = options.tls_cert_path, options.tls_key_path, options.tls_ca_path
        if cert_path is None or key_path is None:
            return None
        caller, worker = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for context in (caller, worker):
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.options |= ssl.OP_NO_RENEGOTIATION
            _load_pair(context, cert_path, key_path)
        if ca_path is None:
            caller.load_default_certs()
            return cls(caller, worker)
        # Workers come and go under any address, so their certificates name none: being of the authority is enough.
        caller.check_hostname = False
        worker.verify_mode = ssl.CERT_REQUIRED
        for context in (caller, worker):
            _load_authorities(context, ca_path)
        return cls(caller, worker)


def _load_pair(context: ssl.SSLContext, cert_path: Path, key_path: Path) -> None:
    _check_pem(cert_path, b"-----BEGIN CERTIFICATE-----", "certificate", "tls_cert_path")
    _check_pem(key_path, b"PRIVATE KEY-----", "private key", "tls_key_path")

    def refuse() -> NoReturn:  # without it OpenSSL reads a passphrase from the terminal
        raise InvalidArgument(f"{key_path}: is locked with a passphrase", field="tls_key_path")

    try:
        context.load_cert_chain(cert_path, key_path, refuse)
    except (OSError, ValueError) as error:
        what = getattr(error, "reason", None) or str(error)
        raise InvalidArgument(f"{key_path} does not go with {cert_path}: {what}", field="tls_key_path") from error


def _load_authorities(context: ssl.SSLContext, ca_path: Path) -> None:
    _check_pem(ca_path, b"-----BEGIN CERTIFICATE-----", "certificate", "tls_ca_path")
    try:
        context.load_verify_locations(ca_path)
    except (OSError, ValueError) as error:
        what = getattr(error, "reason", None) or str(error)
        raise InvalidArgument(f"{ca_path}: holds no usable certificate: {what}", field="tls_ca_path") from error


def _check_pem(path: Path, mark: bytes, what: str, field: str) -> None:
    try:
        holds = mark in path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{path}: cannot be read: {error.strerror or error}", field=field) from error
    if not holds:
        raise InvalidArgument(f"{path}: holds no {what} in PEM form", field=field)
