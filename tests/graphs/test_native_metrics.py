"""The engines' own metrics of a graph with several workers, as one scrape."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from serving.deployment import GraphConfig, HostOptions, hosted_graph


async def test_workers_of_one_engine_share_the_families_of_its_metrics() -> None:
    """A reader refuses a scrape in which a family comes twice."""
    config = GraphConfig(engine="mocker", engine_args={"dp_size": "2"}, workers=3)
    async with hosted_graph(config, HostOptions()) as opened:
        text = opened.native_metrics()
        ids = {f"{worker.worker_id:x}" for worker in opened.workers}
    about = [line for line in text.split("\n") if line.startswith("#")]
    assert len(about) == len(set(about)) > 0
    families = {family.name: family for family in text_string_to_metric_families(text)}
    running = families["vllm:num_requests_running"].samples
    assert {(sample.labels["worker_id"], sample.labels["engine"]) for sample in running} == {
        (worker, rank) for worker in ids for rank in "01"
    }
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"
