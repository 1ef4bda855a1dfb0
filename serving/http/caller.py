"""Caller: on whose account a request is counted."""

from __future__ import annotations

from attrs import frozen
from starlette.types import Scope


@frozen
class Caller:
    """The client of one request. `identity` is what limits per client go by and what log lines show."""

    identity: str


def caller_of(scope: Scope) -> Caller:
    """The caller of the request in this scope: the address of its peer, without the port."""
    client = scope.get("client")
    return Caller(client[0] if client else "unknown")
