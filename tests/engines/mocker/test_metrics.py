"""The metrics of a mock engine, under the names of the simulated engine, as a Prometheus client parses them."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from attrs import evolve
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from engines import as_engine
from engines.mocker import MockEngine, MockEngineArgs
from engines.mocker.latencies import Histogram, Latencies
from engines.mocker.scheduling import Sequence, StepResult
from engines.publishing import EngineMetrics, MetricsContext
from pipeline import Context
from pipeline.protocols import PreprocessedRequest, RoutingHints, SamplingOptions, StopConditions

from .worlds import Steady

CONTEXT = MetricsContext("m", "backend", 0.0, EngineMetrics())
FIRST, GAP, WHOLE = "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"


def request(prompt: int, max_tokens: int, rank: int = 0, **fields: Any) -> PreprocessedRequest:
    stop = StopConditions(max_tokens=max_tokens)
    return PreprocessedRequest([1] * prompt, stop_conditions=stop, routing=RoutingHints(dp_rank=rank), **fields)


async def scraped(engine: Any) -> dict[str, list[Sample]]:
    """Return the samples by name; the text must be valid for a Prometheus parser."""
    text = (await engine.setup_metrics(CONTEXT)).native_text
    assert text is not None
    helps = [line for line in text().split("\n") if line.startswith("# HELP")]
    assert len(helps) == len(set(helps))
    by_name: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text()):
        assert family.type in ("gauge", "counter", "histogram")
        for sample in family.samples:
            by_name.setdefault(sample.name, []).append(sample)
    return by_name


async def read(served: Any, payload: PreprocessedRequest) -> None:
    await (await served.generate(Context(payload))).collect()


async def scraped_while(served: Any, payloads: list[PreprocessedRequest]) -> dict[str, list[Sample]]:
    """Return the samples taken while the requests run, after they have ended."""
    seen: dict[str, list[Sample]] = {}
    async with anyio.create_task_group() as tasks:
        for payload in payloads:
            tasks.start_soon(read, served, payload)
        await anyio.sleep(0.005)
        seen |= await scraped(served.engine)
    return seen


def value(samples: list[Sample], **labels: str) -> float:
    (found,) = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
    return float(found)


VLLM = MockEngineArgs(num_gpu_blocks=10, block_size=4, dp_size=2)


@pytest.mark.parametrize("engine_type", ["vllm", "trtllm"])
async def test_each_rank_shows_what_runs_and_waits_and_how_full_it_is(engine_type: Any) -> None:
    async with as_engine(MockEngine(evolve(VLLM, engine_type=engine_type), timing=Steady())) as served:
        empty = await scraped(served.engine)
        busy = await scraped_while(served, [request(20, 9, rank=1)] * 2)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"):
        samples = empty[f"{engine_type}:{name}"]
        assert [sample.labels for sample in samples] == [{"model_name": "m", "engine": rank} for rank in "01"]
        assert [sample.value for sample in samples] == [0, 0]
    found = {name: [sample.value for sample in samples] for name, samples in busy.items()}
    running = 2 if engine_type == "vllm" else 1
    assert found[f"{engine_type}:num_requests_running"] == [0, running]
    assert found[f"{engine_type}:num_requests_waiting"] == [0, 2 - running]
    assert found[f"{engine_type}:kv_cache_usage_perc"][1] >= 0.5
    assert found[f"{engine_type}:kv_cache_usage_perc"] == found[f"{engine_type}:gpu_cache_usage_perc"]


async def test_pre_emptions_are_counted() -> None:
    engine = MockEngine(VLLM, timing=Steady())
    async with as_engine(engine) as served, anyio.create_task_group() as tasks:
        for start in range(3):
            payload = PreprocessedRequest([start] * 12, stop_conditions=StopConditions(max_tokens=12))
            payload.routing = RoutingHints(dp_rank=0)
            tasks.start_soon(read, served, payload)
    counts = (await scraped(engine))["vllm:num_preemptions_total"]
    assert value(counts, engine="0") == engine.ranks[0].scheduler.preemptions > 0
    assert value(counts, engine="1") == 0


async def test_latencies_are_those_of_the_passes() -> None:
    """One request has 4 tokens, the first after 30 ms; every choice of a request counts."""
    async with as_engine(MockEngine(VLLM, timing=Steady())) as served:
        await scraped(served.engine)
        await read(served, request(3, 4))
        await read(served, request(3, 2, sampling_options=SamplingOptions(n=2)))
        seen = await scraped(served.engine)
    count = {name: value(seen[f"vllm:{name}_count"], engine="0") for name in (FIRST, GAP, WHOLE)}
    total = {name: value(seen[f"vllm:{name}_sum"], engine="0") for name in (FIRST, GAP, WHOLE)}
    assert count == {FIRST: 3, GAP: 5, WHOLE: 3}
    assert total == pytest.approx({FIRST: 0.09, GAP: 0.1, WHOLE: 0.09 + 0.05 + 0.05}, abs=1e-6)
    assert value(seen[f"vllm:{FIRST}_bucket"], engine="0", le="0.02") == 0
    assert value(seen[f"vllm:{FIRST}_bucket"], engine="0", le="0.04") == 3
    assert value(seen[f"vllm:{GAP}_bucket"], engine="0", le="+Inf") == 5
    assert value(seen[f"vllm:{FIRST}_count"], engine="1") == 0


async def test_a_request_for_nothing_is_not_measured() -> None:
    async with as_engine(MockEngine(VLLM)) as served:
        await scraped(served.engine)
        await read(served, request(3, 0))
        seen = await scraped(served.engine)
    assert [value(seen[f"vllm:{name}_count"], engine="0") for name in (FIRST, GAP, WHOLE)] == [0, 0, 0]


@pytest.mark.parametrize("read_tokens", [0, 1, 3])
async def test_a_request_that_is_closed_has_no_whole_and_no_later_tokens(read_tokens: int) -> None:
    async with as_engine(MockEngine(VLLM, timing=Steady())) as served:
        await scraped(served.engine)
        async with await served.generate(Context(request(3, 50))) as stream:
            for _ in range(read_tokens):
                await anext(stream)
        await anyio.sleep(1)
        seen = await scraped(served.engine)
    assert value(seen[f"vllm:{FIRST}_count"], engine="0") == (read_tokens > 0)
    assert value(seen[f"vllm:{GAP}_count"], engine="0") == max(0, read_tokens - 1)
    assert value(seen[f"vllm:{WHOLE}_count"], engine="0") == 0


async def test_sglang_shows_its_ranks_together() -> None:
    args = MockEngineArgs(engine_type="sglang", block_size=4, dp_size=2)
    async with as_engine(MockEngine(args, timing=Steady())) as served:
        assert "sglang:cache_hit_rate" not in await scraped(served.engine)
        for rank in (0, 1, 0, 1):
            await read(served, request(9, 2, rank))
        busy = await scraped_while(served, [request(9, 2, rank) for rank in range(2)])
        seen = await scraped(served.engine)
    labels = {"model_name": "m", "engine_type": "sglang"}
    place = dict.fromkeys(("tp_rank", "pp_rank", "moe_ep_rank"), "0")
    (running,) = busy["sglang:num_running_reqs"]
    assert (running.labels, running.value) == (labels | place, 2)
    assert value(busy["sglang:num_queue_reqs"]) == 0
    assert value(seen["sglang:cache_hit_rate"]) == pytest.approx((0 + 8 / 9 + 8 / 9) / 3)
    (requests,) = seen["sglang:num_requests_total"]
    assert (requests.labels, requests.value) == (labels, 6)
    assert value(seen[f"sglang:{FIRST}_count"]) == value(seen[f"sglang:{GAP}_count"]) == 6
    assert value(seen[f"sglang:{GAP}_bucket"], le="0.025") == 6


async def test_a_prefill_worker_has_no_latencies() -> None:
    async with as_engine(MockEngine(evolve(VLLM, worker_type="prefill"))) as served:
        seen = await scraped(served.engine)
    assert "vllm:num_requests_running" in seen
    assert f"vllm:{FIRST}_count" not in seen


async def test_without_a_metrics_reader_nothing_is_measured() -> None:
    engine = MockEngine(VLLM)
    async with as_engine(engine) as served:
        await read(served, request(3, 4))
        assert all(rank.latencies is None for rank in engine.ranks)


def test_a_bound_belongs_to_the_values_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for number in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(number)
    histogram.observe(3.0, 4)
    assert (histogram.counts, histogram.sum) == ([2, 2, 5], 19.5)


def test_the_tokens_of_a_burst_share_the_time_since_the_one_before() -> None:
    latencies, sequence = Latencies((1.0,), (0.5,), (1.0,)), Sequence([1], 9, block_size=4)
    latencies.begin([sequence], 1.0)
    for now_s, count in ((2.0, 2), (5.0, 3), (6.0, 4)):
        sequence.generate(count)
        finished = [sequence] if sequence.length == sequence.end else []
        latencies.observe_step(StepResult(emitted=[sequence], finished=finished), {sequence}, now_s)
    assert (latencies.first_token.sum, latencies.first_token.counts) == (1.0, [1, 0])
    assert latencies.token_gap.sum == pytest.approx(4.0)
    assert latencies.token_gap.counts == [4, 3]
    assert (latencies.whole.sum, latencies.finished) == (5.0, 1)


def test_a_request_from_before_the_measuring_has_only_its_gaps() -> None:
    latencies, sequence = Latencies((1.0,), (1.0,), (1.0,)), Sequence([1], 2, block_size=4)
    for now_s in (2.0, 5.0):
        sequence.generate()
        finished = [sequence] if sequence.length == sequence.end else []
        latencies.observe_step(StepResult(emitted=[sequence], finished=finished), {sequence}, now_s)
    assert sum(latencies.first_token.counts) == sum(latencies.whole.counts) == 0
    assert latencies.token_gap.sum == 3.0
