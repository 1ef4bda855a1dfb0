"""RouterGauges: what is in flight on the workers there are, and what waits, as of the moment of looking."""

from __future__ import annotations

from random import Random
from threading import Thread
from typing import Any

import anyio
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from operators.kv import KvRouter, KvRouterConfig, RouterGauges, kv_router
from operators.kv.load import SequenceLoad
from operators.kv.prompt import PromptBlocks
from operators.kv.queue import PolicyClass, PolicyProfile
from operators.kv.request import RouteRequest
from operators.kv.types import WorkerRank
from pipeline import Annotated
from pipeline.network import Runtime, Workers, static_workers
from pipeline.protocols import LLMEngineOutput
from pipeline.protocols.kv import KvCleared, KvEvent, RouterEvent
from pipeline.rx import Subject
from pipeline.testing import ScriptedEngine

BLOCK = 4
ONE_AT_A_TIME = PolicyProfile.single(PolicyClass("small", prefill_busy_threshold=0))


class Scraped:
    """A meter, and what its gauges show now: by worker and rank, or by queue class."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.meter = MeterProvider([self._reader], shutdown_on_exit=False).get_meter("test")

    def series(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        data: Any = self._reader.get_metrics_data()
        found = [] if data is None else data.resource_metrics[0].scope_metrics[0].metrics
        return [
            (dict(point.attributes), point.value)
            for metric in found
            if metric.name == f"dynamo_frontend_{name}"
            for point in metric.data.data_points
        ]

    def by(self, label: str, name: str) -> dict[str, Any]:
        return {labels[label]: value for labels, value in self.series(name)}

    def waiting(self) -> list[Any]:
        names = ("requests", "isl_tokens", "cached_tokens")
        return [self.by("policy_class", f"router_queue_pending_{name}") for name in names]


def router_of(workers: Workers[Any, Any] | None = None, **settings: Any) -> KvRouter:
    pool = static_workers({1: ScriptedEngine([]), 2: ScriptedEngine([])}) if workers is None else workers
    config = KvRouterConfig(use_kv_events=False)
    return kv_router(pool, config, block_size_tokens=BLOCK, rng=Random(1), **settings)


def prompt(tokens: int = 8, **settings: Any) -> RouteRequest:
    return RouteRequest(blocks=PromptBlocks(list(range(tokens)), BLOCK), **settings)


async def test_each_rank_shows_what_is_in_flight_on_it() -> None:
    scraped, router = Scraped(), router_of()
    with RouterGauges(router, scraped.meter):
        assert scraped.by("worker_id", "worker_active_decode_blocks") == {"1": 0, "2": 0}
        placement = await router.reserve(prompt(10, worker_id=2), request_id="r")
        labels = {"worker_id": "2", "dp_rank": "0", "worker_type": "decode"}
        assert (labels, 2) in scraped.series("worker_active_decode_blocks")
        assert scraped.by("worker_id", "worker_active_prefill_tokens") == {"1": 0, "2": 10}
        placement.mark_prefill_completed()
        assert scraped.by("worker_id", "worker_active_prefill_tokens") == {"1": 0, "2": 0}
        placement.release()
        assert scraped.by("worker_id", "worker_active_decode_blocks") == {"1": 0, "2": 0}


async def test_prompt_work_that_goes_down_by_time_alone_is_shown_as_of_now() -> None:
    scraped, workers = Scraped(), static_workers({1: ScriptedEngine([])})
    config = KvRouterConfig(use_kv_events=False, router_prefill_load_model="aic")
    with (
        kv_router(workers, config, block_size_tokens=BLOCK, prefill_duration=lambda prompt, cached: 10.0) as router,
        RouterGauges(router, scraped.meter),
    ):
        placement = await router.reserve(prompt(20), request_id="r")
        await anyio.sleep(5)
        assert scraped.by("worker_id", "worker_active_prefill_tokens") == {"1": 10}
        placement.release()


async def test_a_removed_worker_is_not_shown_any_more() -> None:
    scraped = Scraped()
    engine = ScriptedEngine([Annotated(LLMEngineOutput([1]))])
    async with Runtime.in_process() as runtime:
        served = [await runtime.serve("ns/c/generate", engine, instance_id=number) for number in (1, 2)]
        workers = runtime.workers("ns/c/generate")
        await workers.wait_for_instances(2)
        with router_of(workers) as router, RouterGauges(router, scraped.meter):
            await router.reserve(prompt(worker_id=1), request_id="r")
            assert scraped.by("worker_id", "worker_active_decode_blocks") == {"1": 2, "2": 0}
            await served[0].close()
            assert scraped.by("worker_id", "worker_active_decode_blocks") == {"2": 0}
            assert scraped.by("worker_id", "worker_active_prefill_tokens") == {"2": 0}


async def test_a_waiting_request_is_shown_in_its_class_until_it_goes() -> None:
    scraped, router = Scraped(), router_of(static_workers({1: ScriptedEngine([])}), profile=ONE_AT_A_TIME)
    with RouterGauges(router, scraped.meter, model="m"):
        first = await router.reserve(prompt(8), request_id="a")
        assert scraped.waiting() == [{"small": 0}] * 3
        async with anyio.create_task_group() as tasks:

            async def second() -> None:
                (await router.reserve(prompt(10), request_id="b")).release()

            tasks.start_soon(second)
            await anyio.wait_all_tasks_blocked()
            assert scraped.waiting() == [{"small": 1}, {"small": 10}, {"small": 8}]
            ((labels, _),) = scraped.series("router_queue_pending_requests")
            assert labels == {"model": "m", "worker_type": "decode", "policy_class": "small"}
            first.release()
        assert scraped.waiting() == [{"small": 0}] * 3


async def test_two_routers_show_themselves_side_by_side_until_each_is_closed() -> None:
    scraped = Scraped()
    prefill = router_of(static_workers({1: ScriptedEngine([])}), worker_type="prefill")
    decode = router_of(static_workers({1: ScriptedEngine([])}), worker_type="decode")
    with RouterGauges(prefill, scraped.meter):
        with RouterGauges(decode, scraped.meter):
            assert scraped.by("worker_type", "worker_active_decode_blocks") == {"prefill": 0, "decode": 0}
        assert scraped.by("worker_type", "worker_active_decode_blocks") == {"prefill": 0}
        assert list(scraped.by("worker_type", "router_queue_pending_requests")) == ["prefill"]
    assert scraped.series("worker_active_decode_blocks") == scraped.series("router_queue_pending_requests") == []


async def test_each_rank_shows_the_blocks_it_has_and_how_the_router_knows() -> None:
    scraped, router = Scraped(), router_of()
    with RouterGauges(router, scraped.meter):
        (await router.reserve(prompt(10, worker_id=2), request_id="r")).release()
        shown = scraped.series("worker_known_cached_blocks")
    labels = {"dp_rank": "0", "worker_type": "decode", "index": "approximate"}
    assert shown == [({"worker_id": "1", **labels}, 0), ({"worker_id": "2", **labels}, 2)]


async def test_a_rank_that_is_no_worker_of_the_router_is_not_shown() -> None:
    """Another router of the same workers may publish loads of one that this one has not seen yet, or sees no more."""
    scraped, router = Scraped(), router_of()
    with RouterGauges(router, scraped.meter):
        router.loads.sequences.book("r", WorkerRank(9), SequenceLoad([1, 2]), 0.0)
        assert scraped.by("worker_id", "worker_active_decode_blocks") == {"1": 0, "2": 0}


async def test_metrics_may_be_read_in_another_thread() -> None:
    scraped, router = Scraped(), router_of()
    with RouterGauges(router, scraped.meter):
        await router.reserve(prompt(worker_id=1), request_id="r")
        seen: list[Any] = []
        reader = Thread(target=lambda: seen.append(scraped.by("worker_id", "worker_active_decode_blocks")))
        reader.start()
        reader.join()
    assert seen == [{"1": 2, "2": 0}]


async def test_the_router_reports_each_event_it_applies() -> None:
    counted: list[tuple[str, str]] = []
    events: Subject[RouterEvent] = Subject()
    router = kv_router(
        static_workers({1: ScriptedEngine([])}),
        block_size_tokens=BLOCK,
        on_event=lambda *counts: counted.append(counts),
    )
    with router, router.follow(events):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(router.run)
            await anyio.sleep(1)  # the feed has requested what the rank holds
            events.on_next(RouterEvent(1, KvEvent(1, KvCleared())))
            tasks.cancel_scope.cancel()
    assert counted == [("cleared", "ok")]
