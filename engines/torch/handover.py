"""SocketHandover: the KV cache of a prompt, from the process that computed it to the one that answers, as bytes.

    prefill   offer ──► disaggregated_params: where, which, what for          lease runs
    decode    take ──► checks ──► connect ──► bytes ──► KvBytes               lease held meanwhile, then over
                         └─────────┴───────────┴─ any failure ──► None: the prompt is computed again

What the bytes are good for is checked before they are fetched: the model, the layout and type of the cache, and the
prompt itself by its hash; what came, by a checksum of each piece. A fetch needs the id of its offer, 128 random bits,
and nothing else, so the address belongs in a network that is trusted with prompts: by default it is this machine's own.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import anyio
from anyio.abc import ByteStream, SocketAttribute
from attrs import asdict, frozen

from pipeline import CannotConnect, EngineShutdown, InvalidArgument, PenstockError, WorkerOverloaded
from pipeline.errors import InvalidMessage
from pipeline.llm import block_hashes, hash_seed
from pipeline.loop import clock
from pipeline.protocols import PreprocessedRequest
from pipeline.wire import from_plain, to_plain

from .kv_wire import Fetch, Parcel, Received, Wire
from .offers import Offers
from .slots import HeldBlocks, KvBytes

_log = logging.getLogger(__name__)

_PARAMS = "torch_kv"
_FIELD = "prefill_result.disaggregated_params"
_FETCHES_MAX = 8
"""Caches that are read and sent at the same time; each is whole in memory meanwhile."""

T = TypeVar("T")
Connect = Callable[[str, int], Awaitable[ByteStream]]

LEASE_S = 30.0
STALL_S = 5.0


class KvLayoutLike(Protocol):
    """The shape of a cache, an attrs record."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token."""
        ...


class KvStoreLike(Protocol):
    """The blocks of a cache; `read` is called in the thread that computes."""

    @property
    def layout(self) -> KvLayoutLike:
        """Layout of what `read` returns."""
        ...

    def read(self, block_ids: Sequence[int], tokens: int) -> bytes:
        """Return the keys and values of the first tokens in these blocks."""
        ...


class CacheOwner(Protocol):
    """What a hand-over needs of its engine."""

    @property
    def model_name(self) -> str:
        """Name of the model."""
        ...

    @property
    def store(self) -> KvStoreLike:
        """The cache."""
        ...

    async def compute(self, work: Callable[[], T]) -> T:
        """Call a function in the thread that computes, between two steps."""
        ...

    def release(self, held: HeldBlocks) -> None:
        """Free the blocks of an offer."""
        ...


@frozen
class OfferedKv:
    """What decode has to know of a computed prompt; it travels as `disaggregated_params`."""

    host: str
    port: int
    transfer_id: str
    model: str
    """Name of the model that computed it."""
    layout: dict[str, Any]
    """Layout of the cache: see `KvLayout`."""
    tokens: int
    """Tokens of the prompt whose keys and values there are."""
    prompt_hash: int
    """Hash of these tokens, and of the adapter that computed them."""

    @classmethod
    def of_params(cls, params: Any) -> OfferedKv:
        """Return the offer in `disaggregated_params`. Raise InvalidArgument for those of another engine, or damaged."""
        if not isinstance(params, Mapping) or _PARAMS not in params:
            raise InvalidArgument(f"must be an object with {_PARAMS}: the prefill was not by this engine", field=_FIELD)
        try:
            return from_plain(params[_PARAMS], cls)
        except InvalidArgument as error:
            raise InvalidArgument(str(error), field=f"{_FIELD}.{_PARAMS}") from error

    def misfit(self, model: str, layout: Mapping[str, Any], request: PreprocessedRequest) -> str | None:
        """Return why the cache is of no use to a worker for this request; None if it is of use."""
        prompt = request.token_ids[: self.tokens]
        if self.model != model:
            return f"it is of the model {self.model}, and this is {model}"
        if self.layout != layout:
            return f"its layout is {self.layout}, and here it is {dict(layout)}"
        if not 0 < self.tokens == len(prompt) or prompt_hash(request, prompt) != self.prompt_hash:
            return "it is of another prompt, or computed with another adapter"
        return None


def prompt_hash(request: PreprocessedRequest, token_ids: Sequence[int]) -> int:
    """Return the hash of the first tokens of a request, and of the adapter it names."""
    seed = hash_seed(request.routing.lora_name if request.routing else None)
    (whole,) = block_hashes(token_ids, len(token_ids), seed=seed)
    return whole


@frozen
class HandoverTimes:
    """Times of a hand-over."""

    lease_s: float = LEASE_S
    """How long a computed prompt waits to be fetched; then its blocks are free again."""
    stall_s: float = STALL_S
    """How long the other side may take to connect, or for the next piece."""


class SocketHandover:
    """One for each prefill or decode worker. `host` is where a prefill worker listens, and what decode connects to.

    A prefill worker listens from `start` to `close`. Port 0 is any free one.
    """

    def __init__(
        self,
        *,
        prefills: bool,
        host: str = "127.0.0.1",
        port: int = 0,
        times: HandoverTimes = HandoverTimes(),
        connect: Connect = anyio.connect_tcp,
    ) -> None:
        self.host, self.port, self.times, self._connect = host, port, times, connect
        self.failures: Counter[str] = Counter()
        """Fetches of this decode worker that came to nothing, by the class of the error, or `misfit`."""
        self._prefills = prefills
        self._engine: CacheOwner | None = None
        self._offers: Offers | None = None
        self._listener: Any = None
        self._now: Callable[[], float] = lambda: 0.0
        self._changed = anyio.Event()
        self._serving: anyio.CancelScope | None = None
        self._fetches = anyio.CapacityLimiter(_FETCHES_MAX)

    def __len__(self) -> int:
        """Offers that wait, or are being fetched."""
        return 0 if self._offers is None else len(self._offers)

    async def start(self, engine: CacheOwner) -> None:
        """Begin with a started engine. Raise CannotConnect if a prefill worker cannot listen at its address."""
        self._engine, self._now = engine, clock()
        if self._prefills:
            self._offers = Offers(engine.release, self.times.lease_s)
            try:
                self._listener = await anyio.create_tcp_listener(local_host=self.host, local_port=self.port)
            except OSError as error:
                raise CannotConnect(f"the hand-over cannot listen at {self.host}:{self.port}: {error}") from error
            self.port = self._listener.extra(SocketAttribute.local_port)

    async def background(self) -> None:
        """Send offers to those who fetch them, and end leases; return at `close`."""
        if self._listener is None:
            return
        async with self._listener:
            with anyio.CancelScope() as self._serving:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._end_leases)
                    await self._listener.serve(self.serve_connection, tasks)

    async def close(self) -> None:
        """Cut the fetches and release all offers. May be called twice, and after a start that failed."""
        if self._serving is not None:
            self._serving.cancel()  # the listener is closed behind it
        elif self._listener is not None:
            await self._listener.aclose()
        if self._offers is not None:
            self._offers.clear()

    # -- prefill

    def offer(self, request: PreprocessedRequest, held: HeldBlocks) -> dict[str, Any]:
        """Return the `disaggregated_params` of a computed prompt, whose blocks belong to this hand-over from now on.

        They are given to `engine.release` once: when the other side has them, when the lease is over, or at `close`.
        """
        engine, offers = self._started(), self._offers
        if offers is None:
            raise EngineShutdown("the hand-over of a decode worker offers nothing")
        offer = offers.add(held, self._now())
        self._changed.set()
        offered = OfferedKv(
            host=self.host,
            port=self.port,
            transfer_id=offer.transfer_id,
            model=engine.model_name,
            layout=_plain(engine.store.layout),
            tokens=len(held.token_ids),
            prompt_hash=prompt_hash(request, held.token_ids),
        )
        return {_PARAMS: to_plain(offered)}

    async def _end_leases(self) -> None:
        offers = self._offers
        while offers is not None:
            self._changed = anyio.Event()
            next_s = offers.end_over(self._now())
            with anyio.move_on_after(None if next_s is None else next_s - self._now()):
                await self._changed.wait()

    async def serve_connection(self, stream: ByteStream) -> None:
        """Serve one fetch and close its connection; whatever goes wrong on it ends only this one."""
        async with stream:
            try:
                async with self._fetches:
                    await self._send(Wire(stream, self.times.stall_s))
            except _BROKEN as error:
                _log.info("a fetch of a KV cache broke off: %s", _text(error))
            except Exception:  # the cache could not be read, as when the device is lost
                _log.exception("a KV cache could not be sent")

    async def _send(self, wire: Wire) -> None:
        offers, engine = self._offers, self._started()
        wanted = await wire.receive(Fetch)
        offer = None if offers is None else offers.fetch(wanted.transfer_id)
        if offers is None or offer is None:
            await wire.send(Parcel(refusal="there is no such offer, or its lease is over"))
            return
        has_all = False
        try:
            held = offer.held
            data = await engine.compute(lambda: engine.store.read(held.block_ids, len(held.token_ids)))
            await wire.send(Parcel(size_bytes=len(data)))
            await wire.send_data(data)
            has_all = (await wire.receive(Received)).size_bytes == len(data)
        finally:
            if has_all:
                offers.fetched(offer)
            else:
                offers.broke_off(offer, self._now())
            self._changed.set()

    # -- decode

    async def take(self, request: PreprocessedRequest) -> KvBytes | None:
        """Return the cache of the request's prompt, or None to compute it here, because the transfer failed.

        A failure is counted and logged. Cancelling it, which a stop and a kill do, breaks off the transfer. Raise
        InvalidArgument for a `prefill_result` that is not of such a worker.
        """
        engine, prefill = self._started(), request.prefill_result
        offered = OfferedKv.of_params(None if prefill is None else prefill.disaggregated_params)
        layout = engine.store.layout
        if why := offered.misfit(engine.model_name, _plain(layout), request):
            return self._failed("misfit", why)
        try:
            return KvBytes(offered.tokens, await self._fetched(offered, offered.tokens * layout.bytes_per_token))
        except _BROKEN as error:
            return self._failed(type(error).__name__, _text(error))

    async def _fetched(self, offered: OfferedKv, size_bytes: int) -> bytes:
        """Return the bytes. Raise one of `_BROKEN`."""
        with anyio.fail_after(self.times.stall_s):
            stream = await self._connect(offered.host, offered.port)
        async with stream:
            wire = Wire(stream, self.times.stall_s)
            await wire.send(Fetch(offered.transfer_id))
            parcel = await wire.receive(Parcel)
            if parcel.refusal:
                raise WorkerOverloaded(parcel.refusal)
            if parcel.size_bytes != size_bytes:
                raise InvalidMessage(f"{parcel.size_bytes} bytes of a cache are offered, {size_bytes} are needed")
            data = await wire.receive_data(size_bytes)
            await wire.send(Received(size_bytes))
            return data

    def _failed(self, kind: str, why: str) -> KvBytes | None:
        """Count and log a failure; return the result of `take` after it."""
        self.failures[kind] += 1
        _log.warning("a prompt is computed again, its KV cache could not be fetched: %s", why)
        return None

    def _started(self) -> CacheOwner:
        if self._engine is None:
            raise EngineShutdown("the hand-over is not started")
        return self._engine


_BROKEN = (PenstockError, OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)
"""What a transfer may fail with; TimeoutError is an OSError."""


def _plain(layout: Any) -> dict[str, Any]:
    """Return the layout as plain values."""
    return asdict(layout)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
