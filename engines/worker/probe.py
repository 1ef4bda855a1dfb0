"""Probes: small requests, with a marker, that show that an engine works; and whether its endpoint is ready.

    real traffic ──► TrafficObserver ──► adapter      a good item: ready, and the idle time begins anew
    idle for `idle_s` ──► probe ──► adapter           a good first item: ready, anything else: not ready
    payload ──stamp──► {..., "_HEALTH_CHECK": true} ──ProbeEngine──► adapter ──► engine

Source: dynamo lib/runtime/src/health_check.rs, lib/backend-common/src/{worker,health}.rs, and
components/src/dynamo/health_check.py.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any, Self

import anyio
from attrs import frozen

from pipeline import Annotated, AsyncEngine, Context, InvalidArgument, ResponseStream, Take
from pipeline.errors import BackendUnknown
from pipeline.foreign import raise_if_ours
from pipeline.loop import clock
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from pipeline.settings import Variable, above, by_variable, from_environment, number, switch
from pipeline.telemetry import UNTRACED
from pipeline.wire import from_json, from_plain

from ..llm import LLMEngine

HEALTH_CHECK_KEY = "_HEALTH_CHECK"


def health_payload(bos_token_id: int = 1, **extra: Any) -> dict[str, Any]:
    """Return a request for one token after the first of a text, without the marker; `extra` fields are added."""
    return {
        "token_ids": [bos_token_id],
        "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
    } | extra


def stamp(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with the marker of a probe."""
    return {**payload, HEALTH_CHECK_KEY: True}


def is_probe(request: Mapping[str, Any]) -> bool:
    """Return whether the marker is there and exactly true."""
    return request.get(HEALTH_CHECK_KEY) is True


def bos_token_id(tokenizer: Any, default: int = 1) -> int:
    """Return the id of the token that begins a text: the object's own, else its tokenizer's, else the default."""
    for owner in (tokenizer, getattr(tokenizer, "tokenizer", None)):
        found = getattr(owner, "bos_token_id", None)
        if found is not None:
            return int(found)
    return default


def payload_from_text(text: str | None) -> dict[str, Any] | None:
    """A payload given as a JSON object, or as `@file` that holds one; None for anything else."""
    if text is None or not text.strip():
        return None
    try:
        content = Path(text.strip()[1:]).read_text() if text.strip().startswith("@") else text
        return from_json(content, dict[str, Any])
    except (InvalidArgument, OSError, UnicodeDecodeError):
        return None


class ProbeEngine(AsyncEngine[Any, Annotated[LLMEngineOutput]]):
    """Converts probes from plain values and sends them to the engine behind it.

    A payload that is not a request, and a chunk that finished with an error, become error items, so that the probe
    fails.
    """

    def __init__(self, engine: AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]) -> None:
        self._engine = engine

    async def generate(self, request: Context[Any]) -> ResponseStream[Annotated[LLMEngineOutput]]:
        try:
            probe = from_plain(request.payload, PreprocessedRequest)
        except InvalidArgument as error:
            return ResponseStream.of([Annotated.from_error(error)], request)
        stream = await self._engine.generate(request.with_payload(probe))
        return ResponseStream(_failing(stream), request, stream)


async def _failing(
    stream: ResponseStream[Annotated[LLMEngineOutput]],
) -> AsyncGenerator[Annotated[LLMEngineOutput], None]:
    async with stream:
        async for item in stream:
            if item.data is not None and (message := item.data.error_message) is not None:
                yield Annotated.from_error(BackendUnknown(message))
                return
            yield item


_log = logging.getLogger(__name__)

PAYLOAD = Variable("DYN_HEALTH_CHECK_PAYLOAD", "", "Payload of probes: a JSON object, or @file with one.", str)

Items = ResponseStream[Annotated[LLMEngineOutput]]


@frozen
class IdleProbeSettings:
    """Whether to probe, after how long without a good item, and how long a probe may take."""

    is_enabled: bool = by_variable(
        False, "Whether a worker sends itself probes while it has no traffic.", "DYN_HEALTH_CHECK_ENABLED", switch
    )
    idle_s: float = by_variable(
        10.0, "Seconds without a good item after which a probe is sent.", "DYN_CANARY_WAIT_TIME", number(), above(0)
    )
    timeout_s: float = by_variable(
        3.0, "Seconds that a probe may take.", "DYN_HEALTH_CHECK_REQUEST_TIMEOUT", number(), above(0)
    )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """A time that is none, or not above zero, is the default."""
        return cls(**from_environment(cls, environment))


async def choose_payload(
    own: Mapping[str, Any] | None, environment: Mapping[str, str], engine: LLMEngine
) -> dict[str, Any] | None:
    """The payload of probes, marked: the worker's own, else the environment's, else the engine's; None: no probes.

    An own one that is no object, and an engine that fails to give one, mean none; an unreadable one of the environment
    is passed over. Each is logged.
    """
    payload: Mapping[str, Any] | None = own
    if payload is None and (text := PAYLOAD.of(environment)):
        payload = payload_from_text(text)
        if payload is None:
            _log.warning("%s must be a JSON object or @file; the engine's own payload is used", PAYLOAD.name)
    if payload is None:
        try:
            payload = await engine.health_check_payload()
        except BaseException as error:
            raise_if_ours(error)
            _log.warning("the engine gave no health payload; it is not probed", exc_info=True)
    if payload is None:
        return None
    if not isinstance(payload, Mapping):
        _log.warning("a health payload must be an object, got %s; the engine is not probed", type(payload).__name__)
        return None
    return stamp(payload)


class IdleProbe:
    """Probes one endpoint while `run` runs. Made on the loop it runs on.

    `engine` accepts the payload as plain values (`ProbeEngine`). `report` is called with each change: whether the
    endpoint is ready; it must not wait.
    """

    def __init__(
        self,
        engine: AsyncEngine[Any, Annotated[LLMEngineOutput]],
        payload: Mapping[str, Any],
        settings: IdleProbeSettings,
        report: Callable[[bool], object],
    ) -> None:
        self.is_flowing = False
        """Set for a good item in the middle of a stream: such an item costs no more than this mark."""
        self._engine, self._payload, self._settings, self._report = engine, dict(payload), settings, report
        self._is_ready: bool | None = None
        self._is_over = False
        self._clock = clock()
        self._last_good_s = self._clock()

    def observe(self) -> None:
        """Called when a good item of real traffic has come."""
        self._last_good_s, self.is_flowing = self._clock(), False
        self._set(True)

    def stop(self) -> None:
        """Stop reporting readiness."""
        self._is_over = True

    async def run(self) -> None:
        """Probe after each idle time, until cancelled."""
        while not self._is_over:
            await self._idle()
            await self.probe()
            self._last_good_s = self._clock()

    async def probe(self) -> bool:
        """Send one probe; return whether its first item is good and in time. Later items are read and ignored."""
        verdict: list[bool] = []

        def decide(is_good: bool) -> None:
            if not verdict:
                verdict.append(is_good)
                self._set(is_good)

        async with anyio.create_task_group() as tasks:

            async def time_out() -> None:
                await anyio.sleep(self._settings.timeout_s)
                decide(False)  # now: an engine that hangs may not end when it is cancelled
                tasks.cancel_scope.cancel()

            tasks.start_soon(time_out)
            await self._send(decide)
            tasks.cancel_scope.cancel()
        decide(False)  # it failed, or ended without an item
        return verdict[0]

    async def _send(self, decide: Callable[[bool], None]) -> None:
        try:
            request = Context(dict(self._payload))
            request.trace = UNTRACED  # without a client it would be a trace of its own
            async with await self._engine.generate(request) as stream:
                async for item in stream:
                    decide(item.is_ok)
        except Exception as error:
            _log.debug("a probe failed: %s", error)

    async def _idle(self) -> None:
        """Return when no good item has come for the idle time.

        The time of an item in the middle of a stream is not known, only that it came since the last check: it counts
        from the check, so a stream that stalls half-way is noticed after at most twice the idle time.
        """
        while True:
            if self.is_flowing:
                self.is_flowing, self._last_good_s = False, self._clock()
            left_s = self._last_good_s + self._settings.idle_s - self._clock()
            if left_s <= 0:
                return
            await anyio.sleep(left_s)

    def _set(self, is_ready: bool) -> None:
        if self._is_over or is_ready is self._is_ready:
            return
        if not is_ready:
            _log.warning("the health check failed: not ready")
        self._is_ready = is_ready
        self._report(is_ready)


class TrafficObserver(AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]):
    """The same engine, with its good items observed by a probe: a stream's first and last at once, others by a mark.

    Costs a generator around each stream, some 70 nanoseconds an item, so it is used only with a probe.
    """

    def __init__(self, engine: AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]], probe: IdleProbe) -> None:
        self._engine, self._probe = engine, probe

    @property
    def name(self) -> str:
        return self._name or self._engine.name

    def __str__(self) -> str:
        return str(self._engine)

    async def generate(self, request: Context[PreprocessedRequest]) -> Items:
        stream = await self._engine.generate(request)
        return ResponseStream(_observed(stream, self._probe), request, stream, relay=self._relay)

    def _relay(self, take: Take) -> Take:
        """Return what takes plain tokens, which are never the first of a stream."""
        probe = self._probe

        def take_token(*parts: Any) -> bool:
            if not take(*parts):
                return False
            probe.is_flowing = True
            return True

        return take_token


async def _observed(stream: Items, probe: IdleProbe) -> AsyncGenerator[Annotated[LLMEngineOutput], None]:
    async with stream:
        is_observed, item = False, None
        async for item in stream:
            if is_observed:
                if item.event is None and (item.data is None or item.data.finish_reason is None):
                    probe.is_flowing = True
            elif _is_good(item):
                is_observed = True
                probe.observe()
            yield item
        if item is not None and _is_good(item) and not stream.context.is_killed:  # a killed stream may have hung
            probe.observe()


def _is_good(item: Annotated[LLMEngineOutput]) -> bool:
    return item.is_ok and (item.data is None or item.data.error_message is None)
