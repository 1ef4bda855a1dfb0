"""Address: where a server is, read from its URL."""

from __future__ import annotations

from urllib.parse import urlsplit

from attrs import frozen

from pipeline import InvalidArgument

_PORTS = {"http": 80, "https": 443}


@frozen
class Address:
    """The scheme, host and port of a server, and the path that its API is below."""

    scheme: str
    host: str
    port: int
    base_path: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """The address in a URL; `/v1` at its end may be there or not. Raises InvalidArgument for any other text."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidArgument(f"{url!r} is no URL: {error}", field="live") from error
        if parts.scheme not in _PORTS or not host:
            raise InvalidArgument(f"expected a URL such as http://127.0.0.1:8000, got {url!r}", field="live")
        if parts.username is not None or parts.query or parts.fragment or not _is_plain(url):
            raise InvalidArgument(f"a scheme, a host, a port and a path are all that fit, got {url!r}", field="live")
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.scheme, host, _PORTS[parts.scheme] if port is None else port, path)

    @property
    def authority(self) -> str:
        """Host and port as the `Host` header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def is_secure(self) -> bool:
        return self.scheme == "https"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.base_path}"


def _is_plain(url: str) -> bool:
    """Whether it can stand in the first line of a request as it is."""
    return url.isascii() and url.isprintable() and " " not in url
