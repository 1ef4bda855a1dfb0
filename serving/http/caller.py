"""Caller: on whose account a request is counted, and what it may do."""

from __future__ import annotations

import anyio
from attrs import frozen
from starlette.types import Scope

from ..access import ALL_PRIVILEGES, ApiKey, HeldKey, Privilege

_SCOPE_KEY = "penstock.caller"


@frozen
class Caller:
    """The client of one request. `identity` is what limits per client go by and what log lines show.

    `privileges` are all where no keys are set. `held` is the key the request came with, None without one.
    """

    identity: str
    privileges: frozenset[Privilege] = ALL_PRIVILEGES
    held: HeldKey | None = None

    @property
    def key(self) -> ApiKey | None:
        """What is known of the key the request came with."""
        return None if self.held is None else self.held.key

    def may(self, privilege: Privilege) -> bool:
        """Whether the caller has the privilege."""
        return privilege in self.privileges

    def may_use(self, model: str) -> bool:
        """Whether the caller may use the model, and is to know that there is one of this name."""
        return self.key is None or self.key.models is None or model in self.key.models

    def spend(self, tokens: int) -> None:
        """Count the tokens of a request that is over against the rate of the caller's key."""
        if self.held is not None:
            self.held.spend(anyio.current_time(), tokens)


def caller_of(scope: Scope) -> Caller:
    """The caller of the request in this scope: its key, else the address of its peer, without the port."""
    known = scope.get(_SCOPE_KEY)
    return known if isinstance(known, Caller) else Caller(_address(scope))


def identify(scope: Scope, held: HeldKey | None) -> None:
    """Put the caller into the scope where keys are set: the holder of this key, or with None a client without one."""
    if held is None:
        scope[_SCOPE_KEY] = Caller(_address(scope), frozenset())
    else:
        scope[_SCOPE_KEY] = Caller(held.key.name, frozenset(held.key.privileges), held)


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else "unknown"
