"""Address: where a server is, read from its URL."""

from __future__ import annotations

import httpx2
from attrs import frozen

from pipeline import InvalidArgument


@frozen
class Address:
    """The scheme, host and port of a server, and the path that its API is below."""

    url: httpx2.URL

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address in a URL; `/v1` at its end may be there or not. Raises InvalidArgument for any other text."""
        try:
            url = httpx2.URL(text)
        except httpx2.InvalidURL as error:
            raise InvalidArgument(f"{text!r} is no URL: {error}", field="live") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise InvalidArgument(f"expected a URL such as http://127.0.0.1:8000, got {text!r}", field="live")
        if url.userinfo:
            raise InvalidArgument("a user and a password do not fit in the URL; OPENAI_API_KEY is sent", field="live")
        if url.query or url.fragment or not _is_plain(text):
            raise InvalidArgument(f"a scheme, a host, a port and a path are all that fit, got {text!r}", field="live")
        return cls(url.copy_with(path=url.path.rstrip("/").removesuffix("/v1"), query=None, fragment=None))

    def __str__(self) -> str:
        return str(self.url).rstrip("/")


def _is_plain(text: str) -> bool:
    """Whether it can stand in the first line of a request as it is."""
    return text.isascii() and text.isprintable() and " " not in text
