"""PeerHandover: the KV cache of a prompt, from the process that computed it to the one that answers, as bytes.

    prefill   offer ──► disaggregated_params: where, which, what for          lease runs
    decode    take ──► checks ──► request plane ──► bytes ──► KvBytes         lease held meanwhile, then over
                         └─────────┴───────────┴─ any failure ──► None: the prompt is computed again

What the bytes are good for is checked before they are fetched: the model, the layout and type of the cache, and the
prompt itself by its hash; what came, by a checksum of each piece. A fetch needs the id of its offer, 128 random bits,
beside what the request plane demands of every call.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from math import inf
from typing import Any, Protocol, TypeVar

import anyio
from attrs import asdict, define, frozen

from pipeline import (
    AsyncEngine,
    Context,
    Control,
    EngineShutdown,
    InvalidArgument,
    PenstockError,
    ReleaseOnce,
    ResponseStream,
    WorkerOverloaded,
    until_stopped,
)
from pipeline.llm import block_hashes, hash_seed
from pipeline.loop import clock
from pipeline.protocols import PreprocessedRequest
from pipeline.wire import from_plain, to_plain

from ..peers import Peers
from .kv_wire import KvCall, KvPiece, pieces, received
from .offers import Offer, Offers
from .slots import HeldBlocks, KvBytes

_log = logging.getLogger(__name__)

_PARAMS = "torch_kv"
_FIELD = "prefill_result.disaggregated_params"
_FETCHES_MAX = 8
"""Caches that are read and sent at the same time; each is whole in memory meanwhile."""

T = TypeVar("T")

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

    address: str
    """Where the worker is among its peers; empty: nowhere, it has none."""
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
        if not self.address:
            return "the worker that computed it has no peers"
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
    """How long the other side may take to take a call, to send the next piece, or to read it."""


@define(eq=False)
class _Sending:
    """A fetch under way, in the prefill worker."""

    offer: Offer
    control: Control
    """Of the call."""
    has_place: bool = False
    """Whether it is one of those that may be in memory."""
    moved_s: float = inf
    """When its caller was given the last piece; infinite until there is one."""


class PeerHandover(AsyncEngine[KvCall, KvPiece]):
    """One for each prefill or decode worker. As an engine it is what a prefill worker serves to its peers.

    Without peers, as in `as_engine`, nothing is handed over: decode computes each prompt again.
    """

    def __init__(self, *, prefills: bool, times: HandoverTimes = HandoverTimes()) -> None:
        self.times = times
        self.failures: Counter[str] = Counter()
        """Fetches of this decode worker that came to nothing, by the class of the error, or `misfit`."""
        self._prefills = prefills
        self._engine: CacheOwner | None = None
        self._peers: Peers | None = None
        self._address = ""
        self._offers: Offers | None = None
        self._now: Callable[[], float] = lambda: 0.0
        self._changed = anyio.Event()
        self._is_closed = False
        self._sendings: set[_Sending] = set()
        self._places = anyio.CapacityLimiter(_FETCHES_MAX)

    def __len__(self) -> int:
        """Offers that wait, or are being fetched."""
        return 0 if self._offers is None else len(self._offers)

    async def start(self, engine: CacheOwner, peers: Peers | None) -> None:
        """Begin with a started engine. Raise as `Peers.serve`."""
        self._engine, self._peers, self._now = engine, peers, clock()
        if self._prefills:
            self._offers = Offers(engine.release, self.times.lease_s)
            if peers is not None:
                self._address = await peers.serve(self)

    async def background(self) -> None:
        """End leases, and fetches whose callers do not go on; return at `close`."""
        while not self._is_closed:
            self._changed = anyio.Event()
            next_s = self._end_overdue(self._now())
            with anyio.move_on_after(None if next_s is None else next_s - self._now()):
                await self._changed.wait()

    async def drain(self) -> None:
        """Wait until no offer is left, at most `stall_s`: prompts that are not fetched by then are computed again."""
        with anyio.move_on_after(self.times.stall_s):
            while len(self):
                await self._changed.wait()

    async def close(self) -> None:
        """Cut the fetches and release all offers. May be called twice, and after a start that failed."""
        self._is_closed = True
        self._changed.set()
        for sending in list(self._sendings):
            sending.control.kill()
        if self._offers is not None:
            self._offers.clear()

    # -- prefill

    def offer(self, request: PreprocessedRequest, held: HeldBlocks) -> dict[str, Any]:
        """Return the `disaggregated_params` of a computed prompt, whose blocks belong to this hand-over from now on.

        They are given to `engine.release` once: when the other side has them, when the lease is over, at `close`, or at
        once without peers.
        """
        engine, offers = self._started(), self._offers
        if offers is None:
            raise EngineShutdown("the hand-over of a decode worker offers nothing")
        offer = offers.add(held, self._now())
        if not self._address:
            offers.taken(offer.transfer_id)
        self._changed.set()
        offered = OfferedKv(
            address=self._address,
            transfer_id=offer.transfer_id,
            model=engine.model_name,
            layout=_plain(engine.store.layout),
            tokens=len(held.token_ids),
            prompt_hash=prompt_hash(request, held.token_ids),
        )
        return {_PARAMS: to_plain(offered)}

    def _end_overdue(self, now_s: float) -> float | None:
        """End what is overdue; return when something will be next, None if nothing waits."""
        if self._offers is None:
            return None
        for sending in [each for each in self._sendings if each.moved_s + self.times.stall_s <= now_s]:
            _log.info("a fetch of a KV cache broke off: its caller reads no more")
            sending.control.kill()
            self._end(sending)
        stalls_s = [each.moved_s + self.times.stall_s for each in self._sendings]
        lease_s = self._offers.end_over(now_s)
        next_s = min([inf if lease_s is None else lease_s, *stalls_s])
        return None if next_s == inf else next_s

    async def generate(self, request: Context[KvCall]) -> ResponseStream[KvPiece]:
        """Yield the pieces of an offer, which stays until its fetch is over, also beyond its lease.

        Raise WorkerOverloaded if there is no such offer, or no longer. A caller that reads nothing for `stall_s` gets
        no more; a close of the stream leaves the offer to its lease.
        """
        offers, call = self._offers, request.payload
        if offers is not None and call.has_all:
            offers.taken(call.transfer_id)
            self._changed.set()
            return ResponseStream.of([], request)
        if offers is None or (offer := offers.fetch(call.transfer_id)) is None:
            raise WorkerOverloaded("there is no such offer, or its lease is over")
        sending = _Sending(offer, request.control)
        self._sendings.add(sending)
        return ResponseStream(until_stopped(self._sent(sending), request), request, ReleaseOnce(self._end, sending))

    async def _sent(self, sending: _Sending) -> AsyncGenerator[KvPiece, None]:
        engine, held = self._started(), sending.offer.held
        await self._places.acquire_on_behalf_of(sending)
        sending.has_place = True
        try:
            data = await engine.compute(lambda: engine.store.read(held.block_ids, len(held.token_ids)))
            for piece in pieces(data):
                sending.moved_s = self._now()
                self._changed.set()
                yield piece
        except Exception:  # the cache could not be read, as when the device is lost
            _log.exception("a KV cache could not be sent")
            raise

    def _end(self, sending: _Sending) -> None:
        """End a fetch; does nothing the second time."""
        if sending.has_place:
            sending.has_place = False
            self._places.release_on_behalf_of(sending)
        if sending in self._sendings:
            self._sendings.discard(sending)
            if self._offers is not None:
                self._offers.ended(sending.offer, self._now())
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
        if self._peers is None:
            return self._failed("misfit", "this worker has no peers")
        try:
            data = await self._fetched(self._peers, offered, offered.tokens * layout.bytes_per_token)
        except (PenstockError, TimeoutError) as error:
            return self._failed(type(error).__name__, f"{type(error).__name__}: {error}")
        return KvBytes(offered.tokens, data)

    async def _fetched(self, peers: Peers, offered: OfferedKv, size_bytes: int) -> bytes:
        """Return the bytes. Raise PenstockError or TimeoutError."""
        stall_s = self.times.stall_s
        with anyio.fail_after(stall_s):
            peer = await peers.engine(offered.address, KvPiece)
            stream = await peer.generate(Context(KvCall(offered.transfer_id)))
        async with stream:
            data = await received(stream, size_bytes, stall_s)
        try:
            with anyio.fail_after(stall_s):
                async with await peer.generate(Context(KvCall(offered.transfer_id, has_all=True))) as ended:
                    await ended.collect()
        except (PenstockError, TimeoutError) as error:
            _log.info("the blocks of a KV cache that has come stay until the end of their lease: %s", error)
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


def _plain(layout: Any) -> dict[str, Any]:
    """Return the layout as plain values."""
    return asdict(layout)
