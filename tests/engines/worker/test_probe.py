"""Probing an endpoint that is idle."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from attrs import define, field

from engines import EchoEngine
from engines.worker.probe import IdleProbe, IdleProbeSettings, TrafficObserver, choose_payload
from pipeline import Annotated, Context, EngineShutdown, ResponseStream
from pipeline.protocols import FinishReason, LLMEngineOutput, PreprocessedRequest
from pipeline.telemetry import UNTRACED
from pipeline.testing import Fail, OpenStreams, ScriptedEngine, Stall, Wait, check_engine

PAYLOAD = {"token_ids": [1], "_HEALTH_CHECK": True}
REQUEST = PreprocessedRequest([1])
GOOD: Annotated[LLMEngineOutput] = Annotated(LLMEngineOutput([1]))
LAST: Annotated[LLMEngineOutput] = Annotated(LLMEngineOutput([], finish_reason=FinishReason.STOP))
BAD: Annotated[LLMEngineOutput] = Annotated.from_error("bad")


@define
class Watched:
    """A canary, its reports (with their seconds), and the engine it observes."""

    canary: IdleProbe
    real: TrafficObserver
    probed: ScriptedEngine
    reports: list[Any] = field(factory=list)

    async def serve_request(self) -> list[Any]:
        async with await self.real.generate(Context(REQUEST)) as stream:
            return [item async for item in stream]

    @property
    def probes(self) -> int:
        return len(self.probed.requests)


@asynccontextmanager
async def watched(probe: Any, traffic: Any = (GOOD, LAST)) -> AsyncIterator[Watched]:
    """Run a canary whose probes play one script and whose real requests play another."""
    probed, began_s = ScriptedEngine(probe), anyio.current_time()
    reports: list[Any] = []
    canary = IdleProbe(
        probed, PAYLOAD, IdleProbeSettings(True), lambda ready: reports.append((anyio.current_time() - began_s, ready))
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(canary.run)
        yield Watched(canary, TrafficObserver(ScriptedEngine(traffic), canary), probed, reports)
        tasks.cancel_scope.cancel()
    assert probed.open == 0


async def test_an_idle_endpoint_is_probed_after_its_time(open_streams: OpenStreams) -> None:
    async with watched([GOOD, LAST]) as one:
        await anyio.sleep(9.9)
        assert (one.reports, one.probes) == ([], 0)
        await anyio.sleep(10.2)
        assert (one.reports, one.probes) == ([(pytest.approx(10), True)], 2)
    assert [request.payload for request in one.probed.requests] == [PAYLOAD] * 2
    assert [request.trace for request in one.probed.requests] == [UNTRACED] * 2, "no request, so no trace of one"
    assert one.probed.delivered == 4, "what follows the first item is read"


@pytest.mark.parametrize(
    ("probe", "at_s"),
    [
        ([BAD], 10),
        ([Fail(EngineShutdown("gone"))], 10),
        ([], 10),
        ([Stall()], 13),
        ([Wait(3.1), GOOD], 13),
        ([BAD, GOOD], 10),
    ],
)
async def test_a_probe_that_fails_or_yields_nothing_in_time_makes_the_target_not_ready(
    probe: list[Any], at_s: float
) -> None:
    async with watched(probe) as one:
        await anyio.sleep(29)
    assert one.reports == [(pytest.approx(at_s), False)]
    assert one.probes == 2, "it is probed again"


@pytest.mark.parametrize("rest", [[BAD], [Fail(EngineShutdown("gone"))], [Stall()]])
async def test_the_first_item_alone_decides(rest: list[Any], open_streams: OpenStreams) -> None:
    async with watched([GOOD, *rest]) as one:
        await anyio.sleep(25)
    assert one.reports == [(pytest.approx(10), True)]


async def test_an_engine_that_refuses_the_probe_is_not_ready() -> None:
    reports: list[bool] = []
    refusing = ScriptedEngine([], fails=EngineShutdown("gone"))
    assert not await IdleProbe(refusing, PAYLOAD, IdleProbeSettings(), reports.append).probe()
    assert reports == [False]


class Hung(ScriptedEngine):
    """Takes 30 seconds and ignores its cancellation, like a wait for a thread."""

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(30)
        return await super().generate(request)


async def test_a_probe_that_cannot_even_be_cancelled_is_not_ready_in_time() -> None:
    """The late end of the probe does not override a report of real traffic."""
    reports: list[Any] = []
    canary = IdleProbe(
        Hung([GOOD]), PAYLOAD, IdleProbeSettings(), lambda ready: reports.append((anyio.current_time(), ready))
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(canary.probe)
        await anyio.sleep(10)
        assert reports == [(pytest.approx(3), False)]
        canary.observe()
    assert anyio.current_time() == pytest.approx(30)
    assert reports[1:] == [(pytest.approx(10), True)]


async def test_it_becomes_ready_again() -> None:
    answers = iter([[BAD], [GOOD], [BAD]])
    async with watched(lambda _: next(answers)) as one:
        await anyio.sleep(31)
    assert one.reports == [(pytest.approx(10), False), (pytest.approx(20), True), (pytest.approx(30), False)]


# -- real traffic


async def test_real_traffic_makes_ready_at_once_and_puts_the_probe_off(open_streams: OpenStreams) -> None:
    async with watched([BAD]) as one:
        for _ in range(5):
            await anyio.sleep(8)
            await one.serve_request()
        assert (one.reports, one.probes) == ([(pytest.approx(8), True)], 0)
        await anyio.sleep(9.9)
        assert one.probes == 0
        await anyio.sleep(0.2)
    assert one.reports[1:] == [(pytest.approx(50), False)]


@pytest.mark.parametrize(
    "traffic",
    [
        [BAD],
        [Fail(EngineShutdown("gone"))],
        [Annotated(LLMEngineOutput([], finish_reason=FinishReason.error("broken")))],
        [],
    ],
)
async def test_traffic_that_only_errors_does_not_count(traffic: list[Any]) -> None:
    async with watched([BAD], traffic) as one:
        for _ in range(4):
            await anyio.sleep(4)
            with suppress(EngineShutdown):
                await one.serve_request()
    assert one.reports == [(pytest.approx(10), False)]


async def test_a_long_stream_counts_all_along() -> None:
    async with watched([BAD], [GOOD, *(step for _ in range(12) for step in (Wait(5), GOOD)), LAST]) as one:
        assert len(await one.serve_request()) == 14
        assert (one.reports, one.probes) == ([(pytest.approx(0), True)], 0)
        await anyio.sleep(9.9)
        assert one.probes == 0
        await anyio.sleep(0.2)
        assert one.probes == 1


async def test_a_stream_that_stalls_is_noticed_within_twice_the_time() -> None:
    async with watched([BAD], [GOOD, Wait(1), GOOD, Stall()]) as one, anyio.create_task_group() as tasks:
        tasks.start_soon(one.serve_request)
        await anyio.sleep(20.5)
        assert one.reports == [(pytest.approx(0), True), (pytest.approx(20), False)]
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    "last", [BAD, Annotated(LLMEngineOutput([], finish_reason=FinishReason.error("broken"))), Fail(EngineShutdown(""))]
)
async def test_a_stream_that_ends_in_an_error_counts_up_to_that(last: Any) -> None:
    async with watched([BAD], [GOOD, Wait(15), last]) as one:
        with suppress(EngineShutdown):
            await one.serve_request()
        await anyio.sleep(8)
    assert one.reports == [(pytest.approx(0), True), (pytest.approx(10), False)]
    assert one.probes == 2, "the error did not put it off"


async def test_the_end_of_a_killed_stream_does_not_put_the_probe_off(open_streams: OpenStreams) -> None:
    async with watched([BAD], [GOOD, Stall()]) as one:
        request = Context(REQUEST)
        async with await one.real.generate(request) as stream:
            await stream.__anext__()
            await anyio.sleep(5)
            request.kill()
            assert [item async for item in stream] == []
        await anyio.sleep(5.1)
        assert one.reports == [(pytest.approx(0), True), (pytest.approx(10), False)]


async def test_a_stopped_canary_reports_nothing() -> None:
    async with watched([BAD]) as one:
        one.canary.stop()
        await one.serve_request()
        await anyio.sleep(50)
        assert one.reports == []


async def test_three_canaries_do_not_know_each_other() -> None:
    async with watched([GOOD]) as first, watched([BAD]) as second, watched([Stall()]) as third:
        await anyio.sleep(5)
        await second.serve_request()
        await anyio.sleep(9)
    assert first.reports == [(pytest.approx(10), True)]
    assert second.reports == [(pytest.approx(5), True)]
    assert third.reports == [(pytest.approx(13), False)]


async def test_an_observed_engine_holds_the_contract_of_the_one_it_wraps() -> None:
    def observed() -> TrafficObserver:
        script = [item for token in range(64) for item in (Annotated(LLMEngineOutput([token])), Wait(0.001))]
        return TrafficObserver(
            ScriptedEngine(script), IdleProbe(ScriptedEngine([]), PAYLOAD, IdleProbeSettings(), lambda _: None)
        )

    await check_engine(observed, request=REQUEST)


async def test_an_observed_engine_has_the_name_of_the_one_it_wraps() -> None:
    canary = IdleProbe(ScriptedEngine([]), PAYLOAD, IdleProbeSettings(), lambda _: None)
    observed = TrafficObserver(ScriptedEngine([]), canary)
    assert (observed.name, str(observed)) == (ScriptedEngine([]).name, str(ScriptedEngine([])))


# -- settings and payload


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({}, IdleProbeSettings(False, 10.0, 3.0)),
        (
            {
                "DYN_HEALTH_CHECK_ENABLED": "True",
                "DYN_CANARY_WAIT_TIME": "2",
                "DYN_HEALTH_CHECK_REQUEST_TIMEOUT": "0.5",
            },
            IdleProbeSettings(True, 2.0, 0.5),
        ),
        (
            {
                "DYN_HEALTH_CHECK_ENABLED": "0",
                "DYN_CANARY_WAIT_TIME": "0",
                "DYN_HEALTH_CHECK_REQUEST_TIMEOUT": "-1",
            },
            IdleProbeSettings(),
        ),
        ({"DYN_CANARY_WAIT_TIME": "soon", "DYN_HEALTH_CHECK_REQUEST_TIMEOUT": ""}, IdleProbeSettings()),
    ],
)
def test_the_settings_come_from_the_environment(environment: dict[str, str], settings: IdleProbeSettings) -> None:
    assert IdleProbeSettings.from_environment(environment) == settings


class Payload(EchoEngine):
    """Returns the payload it is made with, or fails."""

    def __init__(self, payload: Any) -> None:
        super().__init__()
        self.payload = payload

    async def health_check_payload(self) -> Any:
        if isinstance(self.payload, Exception):
            raise self.payload
        return self.payload


MARKED = {"_HEALTH_CHECK": True}


@pytest.mark.parametrize(
    ("own", "text", "engine", "chosen"),
    [
        ({"a": 1}, '{"b": 2}', {"c": 3}, {"a": 1}),
        ({}, '{"b": 2}', {"c": 3}, {}),
        (None, '{"b": 2, "_HEALTH_CHECK": false}', {"c": 3}, {"b": 2}),
        (None, "{}", {"c": 3}, {}),
        (None, None, {"c": 3}, {"c": 3}),
        (None, " ", {"c": 3}, {"c": 3}),
        (None, "[1]", {"c": 3}, {"c": 3}),
        (None, "@no/such/file", {"c": 3}, {"c": 3}),
        ([1], None, {"c": 3}, None),
        (None, None, None, None),
        (None, None, LookupError("broken"), None),
        (None, None, "text", None),
    ],
)
async def test_the_workers_payload_goes_before_the_environments_before_the_engines(
    own: Any, text: str | None, engine: Any, chosen: dict[str, Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {} if text is None else {"DYN_HEALTH_CHECK_PAYLOAD": text}
    found = await choose_payload(own, environment, Payload(engine))
    assert found == (None if chosen is None else chosen | MARKED)
    odd = own == [1] or text in ("[1]", "@no/such/file") or isinstance(engine, Exception | str)
    assert bool(caplog.records) is odd


async def test_the_environments_payload_may_be_a_file(tmp_path: Path) -> None:
    (file := tmp_path / "p.json").write_text('{"token_ids": [5]}')
    found = await choose_payload(None, {"DYN_HEALTH_CHECK_PAYLOAD": f"@{file}"}, EchoEngine())
    assert found == {"token_ids": [5]} | MARKED
