"""A transfer between two processes: the session is in the prefill worker's, decode takes part in it by calls.

    decode    joins ─────────────────────────── room ──────────────────────── closes its call: it has left
                └──► prefill's exchange ◄────────┘
    decode    ◄── reserve ◄──────── ... prefill held, time on the way ... ──► activate ◄── or the error it ended with

Deadlines, limits and the time on the way are those of the prefill worker's exchange, so both sides end as they do in
one process. The blocks of the decode worker are freed by its own side, whichever way the call ends.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from types import TracebackType
from typing import Literal, Self
from uuid import uuid4

import anyio
from anyio.abc import TaskGroup
from attrs import frozen

from pipeline import AsyncEngine, Cancelled, Context, ContractViolation, Control, PenstockError, ResponseStream
from pipeline.errors import BackendResponseTimeout, InvalidMessage, TransferFailed, TransportError

from .exchange import TransferExchange
from .protocol import ActionOutcome, TransferKey
from .session import DestinationEndpoint, DestinationSide, TransferSession


@frozen
class DestinationCall:
    """A call of a decode worker: it joins the transfer, or it has the room that it was called on to reserve."""

    key: TransferKey
    join_id: str
    """Names its part in the transfer, in all of its calls."""
    missing_tokens: int | None = None
    """Tokens that must be transferred; None: it joins."""


@frozen
class DestinationTurn:
    """What the decode worker has to do now; the answer to its room is `noted`."""

    turn: Literal["reserve", "activate", "noted"]


TransferPeer = AsyncEngine[DestinationCall, DestinationTurn]


class TransferDoor(TransferPeer):
    """Lets decode workers of other processes into the transfers of an exchange.

    `address` is where it is served. A transfer that was agreed on with an earlier start of the worker, at another
    address, is refused with TransferFailed; otherwise joining ends as `TransferExchange.destination` does. A stop,
    a kill and a close leave the transfer, also when the caller's process dies.
    """

    def __init__(self, exchange: TransferExchange) -> None:
        self.address = ""
        self._exchange = exchange
        self._waiting: dict[str, _RemoteDestination] = {}
        """Those that were called on to reserve room, by join id, until their calls end."""

    async def generate(self, request: Context[DestinationCall]) -> ResponseStream[DestinationTurn]:
        call = request.payload
        if call.key.bootstrap_host != self.address:
            raise left(call.key, "the worker was started again since")
        if call.missing_tokens is None:
            return ResponseStream(self._turns(call, request.control), request)
        if (endpoint := self._waiting.get(call.join_id)) is None:
            raise left(call.key, "the transfer is over")
        endpoint.has_room(call.missing_tokens)
        return ResponseStream.of([DestinationTurn("noted")], request)

    async def _turns(self, call: DestinationCall, control: Control) -> AsyncGenerator[DestinationTurn, None]:
        endpoint = _RemoteDestination(_Elsewhere(), lambda taken: self._exchange.join(call.key, taken), control)
        try:
            async with endpoint:
                await endpoint.called_on()
                self._waiting[call.join_id] = endpoint
                yield DestinationTurn("reserve")
                await endpoint.done()
            yield DestinationTurn("activate")
        except Cancelled:
            if not control.is_stopped:
                raise
        finally:
            self._waiting.pop(call.join_id, None)


class _Elsewhere(DestinationSide):
    """The blocks are in the other process, which reserves room when called on and frees it when its call ends."""

    async def reserve(self) -> int:
        raise ContractViolation("room is reserved in the process of the decode worker")

    def activate(self) -> None: ...

    def cancel(self) -> None: ...


class _RemoteDestination(DestinationEndpoint):
    """The decode worker's endpoint, as far as it is in the process of the prefill worker."""

    async def called_on(self) -> None:
        """Return when it is the decode worker's turn to reserve room. Raise as `done`."""
        await self._until(lambda session: self.role in session.turns)
        session = self._joined()
        self.has_begun = True
        session.acknowledge(session.turns.pop(self.role).kind, ActionOutcome.ACCEPTED)

    def has_room(self, missing_tokens: int) -> None:
        """Report the room. Raise as `Transfer.destination_reserved`, which ends the transfer for both sides."""
        session = self._joined()
        try:
            session.perform(session.transfer.destination_reserved(missing_tokens))
        except Exception as error:
            session.give_up("failed", self.role, error)
            raise

    def _joined(self) -> TransferSession:
        assert self._session is not None, "it has been entered"
        return self._session


class PeerDestination:
    """The decode worker's endpoint of a transfer with a prefill worker of another process; as `DestinationEndpoint`.

    `find` returns the `TransferDoor` of that worker. The whole may take `timeout_s`.
    """

    def __init__(
        self,
        find: Callable[[], Awaitable[TransferPeer]],
        key: TransferKey,
        side: DestinationSide,
        control: Control,
        *,
        timeout_s: float,
    ) -> None:
        self._find, self._key, self._side, self._control, self._timeout_s = find, key, side, control, timeout_s
        self._join_id = str(uuid4())
        self._is_active = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_active:
            self._side.cancel()

    async def done(self) -> None:
        """Return when the blocks have arrived.

        Raise as `SessionEndpoint.done`, and TransferFailed if the other side's process cannot be reached, is lost, or
        was started again.
        """
        with anyio.CancelScope(deadline=anyio.current_time() + self._timeout_s) as scope:
            forget = self._control.on_stop(scope.cancel)
            try:
                await self._take_part()
            finally:
                forget()
        if self._is_active:
            return
        of = f"of the transfer of request {self._key.request_id!r}"
        if self._control.is_stopped:
            raise Cancelled(f"the destination {of} was stopped")
        raise BackendResponseTimeout(f"the session {of} took too long")

    async def _take_part(self) -> None:
        failure: Exception | None
        try:
            peer = await self._find()
            async with await peer.generate(Context(DestinationCall(self._key, self._join_id))) as turns:
                failure = await self._follow(turns, peer)
        except TransportError as error:
            failure = error
        if isinstance(failure, TransportError):
            raise left(self._key, str(failure))
        if failure is not None:
            raise failure

    async def _follow(self, turns: ResponseStream[DestinationTurn], peer: TransferPeer) -> Exception | None:
        """Do what is this side's turn until the blocks are there; return the error it ended with otherwise."""
        failures: list[Exception] = []
        async with anyio.create_task_group() as tasks:
            try:
                await self._turn(turns, "reserve")
                tasks.start_soon(self._reserve, peer, tasks, failures)
                await self._turn(turns, "activate")
                self._side.activate()
                self._is_active = True
            except Exception as error:
                failures.append(error)
            tasks.cancel_scope.cancel()
        return failures[0] if failures and not self._is_active else None

    async def _turn(self, turns: ResponseStream[DestinationTurn], expected: str) -> None:
        """Return when the other side calls on this one for it."""
        async for turn in turns:
            if turn.turn != expected:
                raise InvalidMessage(f"expected the turn to {expected}, found {turn.turn}")
            return
        raise left(self._key, "it ended the transfer")

    async def _reserve(self, peer: TransferPeer, tasks: TaskGroup, failures: list[Exception]) -> None:
        try:
            missing_tokens = await self._side.reserve()
            room = DestinationCall(self._key, self._join_id, missing_tokens)
            async with await peer.generate(Context(room)) as noted:
                async for _ in noted:
                    pass
        except Exception as error:
            failures.append(error)
            tasks.cancel_scope.cancel()


def left(key: TransferKey, why: str) -> PenstockError:
    """Return the error of a decode worker that does not reach its prefill worker.

    Another start may succeed, also if both are well and only the way between them is not. As text: the cause is a
    fault of that worker, and this error belongs to the other one.
    """
    return TransferFailed(f"the source of the transfer of request {key.request_id!r} left: {why}")
