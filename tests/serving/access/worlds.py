"""Certificates made by a test."""

from __future__ import annotations

import os
from pathlib import Path

import trustme
from attrs import define, field


@define
class Certificates:
    """A CA, and the two files of a server's certificate, which can be written anew."""

    folder: Path
    ca: trustme.CA = field(factory=trustme.CA)

    @property
    def cert(self) -> Path:
        return self.folder / "cert.pem"

    @property
    def key(self) -> Path:
        return self.folder / "key.pem"

    @property
    def ca_file(self) -> Path:
        path = self.folder / "ca.pem"
        self.ca.cert_pem.write_to_path(path)
        return path

    def issue(self, *hosts: str) -> Certificates:
        """Write a new certificate and its key."""
        made = self.ca.issue_cert(*(hosts or ("127.0.0.1", "localhost")))
        self.write(self.cert, b"".join(part.bytes() for part in made.cert_chain_pems))
        self.write(self.key, made.private_key_pem.bytes())
        return self

    def write(self, path: Path, content: bytes) -> None:
        """Write a file, with a time of its own: two writes may fall into one tick of the file system's clock."""
        later = path.stat().st_mtime_ns + 10**9 if path.exists() else None
        path.write_bytes(content)
        if later is not None:
            os.utime(path, ns=(later, later))
