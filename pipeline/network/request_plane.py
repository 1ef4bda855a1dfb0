"""The request plane: how a request reaches an instance and its items come back.

caller ──► AsyncEngine of an instance ──►  plane  ──► Serving ──► engine
caller ◄── items, stop, kill, close   ◄──►  ...  ◄──►         ◄── items
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

from pipeline import AsyncEngine, CannotConnect

from .names import Instance

Out = TypeVar("Out")


class Serving(ABC):
    """An engine that takes requests of one instance, until it is cut."""

    @property
    @abstractmethod
    def running(self) -> int:
        """Requests that have not ended."""

    @abstractmethod
    def refuse(self) -> None:
        """Takes no new request: callers get CannotConnect. What runs goes on."""

    @abstractmethod
    async def drained(self) -> None:
        """Returns when nothing runs."""

    @abstractmethod
    def cut(self) -> None:
        """Refuses, and ends what runs at once: the engine is killed, its callers get Disconnected."""


class RequestPlane(ABC):
    """See the module."""

    @abstractmethod
    async def serve(self, instance: Instance, engine: AsyncEngine[Any, Any]) -> tuple[Instance, Serving]:
        """Takes requests for the instance from now on; the instance comes back with its `transport`.

        Where payloads cross as bytes they are read as the type the engine declares that it takes. Raises
        InvalidArgument if this process serves the instance already.
        """

    @abstractmethod
    def engine(self, instance: Instance, item_type: type[Out]) -> AsyncEngine[Any, Out]:
        """The instance as an engine, which holds the engine contract.

        Where items cross as bytes they are read as the type.
        Stop, kill and close of the caller reach the instance's engine. An error comes back as its own class, foreign
        ones as `Unknown`. An instance that cannot be reached raises CannotConnect when it is asked; one that is lost
        while it answers makes the read raise Disconnected, unless the caller has stopped the request. Nothing but
        payload, id, metadata and trace of the context crosses.
        """

    @abstractmethod
    async def close(self) -> None:
        """Cuts everything this process serves and lets go of every connection."""


def not_found(name: str, instance_id: int) -> CannotConnect:
    """The error for an instance that is not there (any more)."""
    return CannotConnect(f"instance_id={instance_id} not found for endpoint {name}")
