"""MockEngine: an engine without a model that schedules, caches, preempts and takes time as a real one does.

    request ──► plan ──► rank's scheduler ── steps ──► chunks of tokens, usage, the end
                              └──► KV events, also over ZeroMQ; snapshots; metrics

Its tokens follow from the request alone, so a migrated request continues with the same tokens.

Source: dynamo lib/mocker/src/engine.rs and components/src/dynamo/mocker. Other than there, live and simulated runs are
the same code on another clock, and blocks of a request are freed whichever way it ends.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping
from collections.abc import Sequence as Items
from contextlib import ExitStack, aclosing
from typing import Any, ClassVar
from uuid import uuid4

import anyio
from anyio.lowlevel import checkpoint
from attrs import evolve

from pipeline import EngineShutdown, InvalidArgument
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest

from ..llm import EngineConfig, GenerateContext, LLMEngine
from ..peers import Peers
from ..publishing import MetricsBindings, MetricsContext, PushSource, SnapshotPublisher
from ..worker import health_payload
from .answer import Answer, empty_answer
from .args import MockEngineArgs
from .build import check_timing, idle_arguments, make_timing
from .horizon import Horizon
from .metrics import NativeMetrics
from .rank import Rank
from .request import RecordedOutputs, RequestPlan, checked_rank, plan_request
from .scheduling import AT_ONCE_TOKENS, u32s
from .timing import TimingModel
from .transfer import (
    DestinationEndpoint,
    DestinationTurn,
    PeerDestination,
    Receiver,
    Sender,
    TransferDoor,
    TransferExchange,
    TransferKey,
    TransferTiming,
    transfer_delay_ms,
    transfer_order,
    transferred,
)
from .zmq_events import EventFeed

_log = logging.getLogger(__name__)

MODEL = "mocker-model"


class MockEngine(LLMEngine):
    """A simulated engine with `args.dp_size` ranks, each with a cache and a batch of its own.

    `timing` replaces the model of time that the arguments select. Prefill and decode workers of one process share an
    `exchange`; those of several processes meet over the request plane of their `Worker`s. Generated tokens are from the
    range `token_ids`, which a tokenizer must know. `model` is the name in the `EngineConfig`. `clock` returns the time
    of day in seconds for KV events over ZeroMQ, by default the loop's time. Raises InvalidArgument if the arguments
    describe a predictor of times and there is no `timing`; the start logs a warning for arguments without an effect.

    With a `horizon` it runs ahead in virtual time on asyncio: the tokens after the first then come in one
    `TimedOutput`, with the last. Without a reader of KV events it publishes none, without one of loads neither these
    nor metrics, and without one of rates it measures none.

    A request with an answer in `recorded`, or in the file of the arguments instead, gets that answer. After a stop one
    chunk with finish reason cancelled follows, after a kill nothing; either way, and when a stream is closed or
    dropped, the request's blocks are free at once. `cleanup` ends running requests as a stop does, and the sockets.
    """

    ends_on_kill: ClassVar[bool] = True

    def __init__(
        self,
        args: MockEngineArgs | None = None,
        *,
        timing: TimingModel | None = None,
        exchange: TransferExchange | None = None,
        token_ids: range | None = None,
        recorded: RecordedOutputs | None = None,
        horizon: Horizon | None = None,
        has_event_reader: bool = True,
        has_load_reader: bool = True,
        has_rate_reader: bool = True,
        model: str = MODEL,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self.args = MockEngineArgs() if args is None else args
        if timing is None:
            check_timing(self.args)
        if token_ids is not None and not token_ids:
            raise InvalidArgument("there must be a token to generate", field="token_ids")
        self._timing = timing
        self.exchange = exchange
        self._token_ids = token_ids
        self._model = model
        self._clock = clock
        self._recorded = recorded
        self._horizon = horizon
        self._has_event_reader = has_event_reader
        self._has_load_reader, self._has_rate_reader = has_load_reader, has_rate_reader
        self._metrics: NativeMetrics | None = None
        self._owned = ExitStack()
        self._answers: dict[str, Answer] = {}
        self._peers: Peers | None = None
        self._address: str | None = None
        self._turn = 0
        self.is_closing = False
        self.ranks: list[Rank] = []

    @property
    def preemptions(self) -> int:
        """How often a request was preempted, on all ranks."""
        return sum(rank.scheduler.preemptions for rank in self.ranks)

    async def setup_peers(self, peers: Peers) -> None:
        self._peers = peers
        if self.exchange is None:
            order, session_s = transfer_order(self.args.engine_type), self.args.handoff_session_timeout_ms / 1000
            self.exchange = TransferExchange(order, session_timeout_s=session_s)

    async def start(self, worker_id: int) -> EngineConfig:
        """Raises EngineShutdown if it was started before, InvalidArgument for files and extras its arguments need, and
        Unavailable for a port that is taken; what it opened until then is closed.
        """
        if self.ranks or self.is_closing:
            raise EngineShutdown("a mock engine starts once")
        args = self.args
        for name, why in idle_arguments(args, has_timing=self._timing is not None):
            _log.warning("%s=%s has no effect: %s", name, getattr(args, name), why)
        timing = make_timing(args) if self._timing is None else self._timing
        if args.response_replay_trace_path is not None:
            self._recorded = RecordedOutputs.load(args.response_replay_trace_path)
        with ExitStack() as owned:
            ranks = [
                Rank(rank, args, timing, seed_offset=worker_id * args.dp_size + rank) for rank in range(args.dp_size)
            ]
            for rank in ranks:
                rank.horizon = self._horizon
                rank.feed = EventFeed.bound(rank.scheduler.pool, args, rank.dp_rank, self._clock)
                if rank.feed is not None:
                    owned.callback(rank.feed.close)
            if args.startup_time:
                await anyio.sleep(args.startup_time)
            await self._serve_transfers(owned)
            self.ranks, self._owned = ranks, owned.pop_all()
        return self._config()

    async def _serve_transfers(self, owned: ExitStack) -> None:
        """Let decode workers of other processes meet this prefill worker, if it has a meeting point."""
        if self._peers is None or self.exchange is None or self._bootstrap_port is None:
            return
        door = TransferDoor(self.exchange)
        self._address = door.address = await self._peers.serve(door)
        self.exchange.hosts.add(door.address)
        owned.callback(self.exchange.hosts.discard, door.address)

    @property
    def _bootstrap_port(self) -> int | None:
        return self.args.bootstrap_port if self.args.worker_type == "prefill" else None

    def _config(self) -> EngineConfig:
        args, bootstrap_port = self.args, self._bootstrap_port
        return EngineConfig(
            model=self._model,
            context_length=args.max_model_len,
            kv_cache_block_size=args.block_size,
            total_kv_blocks=args.num_gpu_blocks,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            data_parallel_size=args.dp_size,
            bootstrap_host=None if bootstrap_port is None else self._address or "127.0.0.1",
            bootstrap_port=bootstrap_port,
            stops_prefills=args.worker_type == "prefill",
        )

    async def background(self) -> None:
        async with anyio.create_task_group() as ranks:
            for rank in self.ranks:
                ranks.start_soon(rank.run)

    async def generate(
        self, request: PreprocessedRequest, context: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """Raises InvalidArgument for a request it cannot serve or whose id is in use, EngineShutdown unless started."""
        # Before all checks: meanwhile others may come with the same id, or the engine may be closed.
        long_prompt = await _as_array(request.token_ids) if len(request.token_ids) > AT_ONCE_TOKENS else None
        if self.is_closing or not self.ranks:
            raise EngineShutdown("the mock engine is not running")
        running = self._answers.get(context.id)
        if running is not None and not running.control.is_stopped:  # a stopped request may be retried
            raise InvalidArgument(f"request {context.id!r} is running already", field="id")
        recorded = None if self._recorded is None else self._recorded.find(request, context.id)
        plan = plan_request(request, self.args, token_ids=self._token_ids, recorded=recorded)
        if long_prompt is not None:
            plan = evolve(plan, prompt=long_prompt)
        receives = self.args.worker_type == "decode" and request.bootstrap_info is not None
        if not plan.output_tokens and not receives:  # a prefill worker waits until its blocks are taken
            for chunk in empty_answer(len(plan.outputs), context.control):
                yield chunk
            return
        answer = self._answers[context.id] = self._answer(request, plan, context)
        try:
            if long_prompt is not None:
                await answer.prepare()
            async with aclosing(self._chunks(request, answer, context.id)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            if self._answers.get(context.id) is answer:
                del self._answers[context.id]
            answer.close()

    async def cleanup(self) -> None:
        self.is_closing = True
        for answer in list(self._answers.values()):
            answer.give_up()
        self._owned.close()

    async def kv_event_sources(self) -> Items[PushSource]:
        if not self.args.publishes_kv_events:
            return ()
        return [
            PushSource(rank.publish_to if self._has_event_reader else lambda publisher: None, rank.dp_rank)
            for rank in self.ranks
        ]

    async def setup_metrics(self, context: MetricsContext) -> MetricsBindings:
        if not self._has_load_reader:
            return MetricsBindings([rank.dp_rank for rank in self.ranks], self._measure_for)
        if self._metrics is None:
            self._metrics = NativeMetrics(self.args, context.model, self.ranks)
        return MetricsBindings([rank.dp_rank for rank in self.ranks], self._show_in, self._metrics.text)

    async def health_check_payload(self) -> Mapping[str, Any]:
        return health_payload()

    def _show_in(self, publisher: SnapshotPublisher) -> None:
        self._measure_for(publisher)
        for rank in self.ranks:
            rank.reports.snapshots = publisher

    def _measure_for(self, publisher: SnapshotPublisher) -> None:
        for rank in self.ranks if self._has_rate_reader else ():
            rank.reports.measure(publisher)

    def _answer(self, request: PreprocessedRequest, plan: RequestPlan, context: GenerateContext) -> Answer:
        rank, control = self.ranks[self._rank_for(request)], context.control
        if self.args.worker_type != "prefill":
            return Answer(plan, rank, control, offer=context.offer_token)
        params = {"mocker_handle": str(uuid4()), "completed_tokens": len(plan.prompt)}
        transfers = request.bootstrap_info is not None
        delay_s = 0.0 if transfers else self._transfer_delay_s(len(plan.prompt))
        return Answer(plan, rank, control, params=params, last_delay_s=delay_s)

    def _chunks(
        self, request: PreprocessedRequest, answer: Answer, request_id: str
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """Return the answer's chunks: of an ordinary request, or of one side of a transfer."""
        info = request.bootstrap_info
        if info is None or self.args.worker_type == "aggregated":
            answer.begin()
            return answer.chunks()
        if self.exchange is None:
            raise InvalidArgument("this worker shares no exchange with others", field="bootstrap_info")
        key = TransferKey.of(info, request_id)
        if self.args.worker_type == "decode":
            return transferred(answer, self._destination(key, answer, self.exchange))
        sender = Sender(answer, self._transfer(len(request.token_ids)))
        return transferred(answer, self.exchange.source(key, sender, answer.control))

    def _destination(
        self, key: TransferKey, answer: Answer, exchange: TransferExchange
    ) -> DestinationEndpoint | PeerDestination:
        """Return this side of a transfer: in the exchange, or with a prefill worker of another process."""
        side, host, peers = Receiver(answer), key.bootstrap_host, self._peers
        if peers is None or host in exchange.hosts or not peers.is_address(host):
            return exchange.destination(key, side, answer.control)
        timeout_s = exchange.session_timeout_s
        return PeerDestination(
            lambda: peers.engine(host, DestinationTurn), key, side, answer.control, timeout_s=timeout_s
        )

    def _rank_for(self, request: PreprocessedRequest) -> int:
        """Return the rank named in the request, else the next one in turn."""
        if (named := checked_rank(request, self.args)) is not None:
            return named
        turn, self._turn = self._turn, (self._turn + 1) % len(self.ranks)
        return turn

    def _transfer(self, prompt_tokens: int) -> TransferTiming:
        args = self.args
        return TransferTiming(
            prompt_tokens, args.kv_bytes_per_token, args.kv_transfer_bandwidth, args.kv_transfer_timing_mode
        )

    def _transfer_delay_s(self, prompt_tokens: int) -> float:
        """Return the delay of a prefill's last chunk without an exchange: the time its blocks would be on their way."""
        timing = self._transfer(prompt_tokens)
        delay_ms = transfer_delay_ms(timing, prompt_tokens, worker_type=self.args.worker_type, is_completed=True)
        return (delay_ms or 0.0) / 1000


async def _as_array(prompt: Items[int]) -> array[int]:
    """Return the prompt as an array, made in steps between which other tasks run."""
    found = array("I")
    for start in range(0, len(prompt), AT_ONCE_TOKENS):
        found += u32s(prompt[start : start + AT_ONCE_TOKENS], "token_ids")
        await checkpoint()
    return found
