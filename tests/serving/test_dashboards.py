"""Dashboards show what a server has: ours in `deploy/grafana`, and the queries of NVIDIA Dynamo's."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.from_thread import start_blocking_portal
from prometheus_client.parser import text_string_to_metric_families

from pipeline import Disconnected
from pipeline.errors import ExceededLimit
from serving.deployment import GraphConfig, HostOptions, hosted_graph
from serving.http import Telemetry, app
from serving.problems import Problem
from tests.serving.worlds import Exchange, chat

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "penstock.json"
Exposed = dict[str, set[str]]
"""By the name of a sample, the labels that all its series have."""

_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTED = re.compile(r"([A-Za-z_:][\w:]*)\s*(?:\{([^}]*)\})?(?!\s*[\w(:])")
_KEYWORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan", "le", "start", "end"}

DYNAMOS = """
dynamo_frontend_requests_total{request_type,status,model,endpoint,error_type}
dynamo_frontend_requests_started_total{model,endpoint,request_type}
dynamo_frontend_inflight_requests{model}
dynamo_frontend_queued_requests{model}
dynamo_frontend_time_to_first_token_seconds_sum{model}
dynamo_frontend_time_to_first_token_seconds_count{model}
dynamo_frontend_time_to_first_token_seconds_bucket{model,le}
dynamo_frontend_request_duration_seconds_sum{model}
dynamo_frontend_request_duration_seconds_count{model}
dynamo_frontend_inter_token_latency_seconds_sum{model}
dynamo_frontend_inter_token_latency_seconds_count{model}
dynamo_frontend_input_sequence_tokens_sum{model}
dynamo_frontend_input_sequence_tokens_count{model}
dynamo_frontend_output_sequence_tokens_sum{model}
dynamo_frontend_output_sequence_tokens_count{model}
dynamo_frontend_output_tokens_total{model}
dynamo_frontend_cached_tokens_sum{model}
dynamo_frontend_model_total_kv_blocks{model}
dynamo_frontend_model_max_num_seqs{model}
dynamo_frontend_model_max_num_batched_tokens{model}
dynamo_frontend_model_context_length{model}
dynamo_frontend_model_kv_cache_block_size{model}
dynamo_frontend_model_migration_limit{model}
dynamo_component_requests_total{dynamo_namespace,dynamo_component,dynamo_endpoint,worker_id}
dynamo_component_inflight_requests{dynamo_component,dynamo_endpoint}
dynamo_component_request_duration_seconds_sum{dynamo_component,dynamo_endpoint}
dynamo_component_request_duration_seconds_count{dynamo_component,dynamo_endpoint}
dynamo_component_request_duration_seconds_bucket{dynamo_component,dynamo_endpoint,le}
dynamo_component_request_bytes_total{dynamo_component,dynamo_endpoint}
dynamo_component_response_bytes_total{dynamo_component,dynamo_endpoint}
dynamo_component_gpu_cache_usage_percent{dynamo_component,dp_rank,model}
dynamo_component_total_blocks{dynamo_component,dp_rank,model}
dynamo_component_model_load_time_seconds{model}
dynamo_component_router_requests_total{dynamo_component,router_id}
dynamo_component_router_kv_hit_rate_sum{dynamo_component,router_id}
"""
"""What Dynamo's dashboards for its front end, its disaggregated workers and its router look at, with the labels they
filter and group by. Those of GPUs, of the orchestrator and of the engines are others' to serve."""


def selected(expr: str) -> Iterator[tuple[str, set[str]]]:
    """Each metric that a query reads, with the labels it filters by."""
    bare = _GROUPING.sub("", re.sub(r"\[[^\]]*\]", "", expr))
    quoteless = re.sub(r'"(?:[^"\\]|\\.)*"', '""', bare)
    for found in _SELECTED.finditer(quoteless):
        name, matchers = found[1], found[2] or ""
        if name not in _KEYWORDS and not name.isdigit():
            yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))


def grouped(expr: str) -> set[str]:
    """The labels a query groups by."""
    return {label.strip() for group in _GROUPING.findall(expr) for label in group.split(",") if label.strip()}


def wrong_panels(dashboard: dict[str, Any], exposed: Exposed) -> list[str]:
    """What is wrong with the queries of a dashboard, given what is exposed."""
    wrong: list[str] = []
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            metrics = list(selected(target["expr"]))
            wrong += [] if metrics else [f"{panel['title']}: no metric"]
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            for name, labels in metrics:
                if name not in exposed:
                    wrong.append(f"{panel['title']}: {name} is not exposed")
                    continue
                grouping = grouped(target["expr"])
                kept = grouping or exposed[name]
                wrong += [f"{panel['title']}: {name} has no {each}" for each in (labels | grouping) - exposed[name]]
                wrong += [f"{panel['title']}: the legend has no {each}" for each in shown - kept]
    return wrong


def read(text: str) -> Exposed:
    exposed: Exposed = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = set(sample.labels)
            exposed[sample.name] = exposed[sample.name] & labels if sample.name in exposed else labels
    return exposed


@pytest.fixture(scope="module")
def page() -> str:
    """The metrics of a server after traffic of every kind: whole, streamed, refused, given up, migrated, prefilled."""

    async def traffic() -> str:
        telemetry = Telemetry()
        config = GraphConfig(engine="mocker", model_name="m", workers=2, prefill_workers=1, router="kv", seed=1)
        async with hosted_graph(config, HostOptions(metrics=telemetry.component_metrics)) as opened:
            for worker in opened.workers:
                assert worker.card is not None
                worker.card.runtime_config.context_length = 4096  # as the engine of a real model publishes
            telemetry.models.add(lambda: [worker.card for worker in opened.workers], config.migration_limit)
            telemetry.count_connections(lambda: 1)
            service = app(opened.graph, telemetry=telemetry)

            def send(**fields: Any) -> Exchange:
                usual: dict[str, Any] = {"max_tokens": 4, "messages": [{"role": "user", "content": "hi " * 99}]}
                return chat(service, **(usual | fields))

            for fields in ({}, {"stream": True}, {"model": "x"}, {"max_tokens": 0}):
                await send(**fields).run()
            leaving = send(stream=True, max_tokens=9999)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(leaving.run)
                await leaving.until(lambda seen: seen.writes)
                leaving.leave()
            for worker in opened.workers:
                worker.engine.generate = failing  # type: ignore[method-assign, assignment]
            await send().run()
            exceeded = ExceededLimit("max_tools", 2, 1)
            telemetry.refusals.report(Problem(400, "m", "validation", exceeded=exceeded))
            return telemetry.text().decode()

    def failing(*_: Any) -> Any:
        raise Disconnected("gone")

    with start_blocking_portal("asyncio") as portal:
        return portal.call(traffic)


def test_every_metric_of_our_dashboard_is_exposed_with_its_labels(page: str) -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert wrong_panels(dashboard, read(page)) == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("refused_requests_total", "rejected_requests_total", "is not exposed"),
        ("sum by (limit)", "sum by (bound)", "has no bound"),
        ('status=\\"error\\"', 'state=\\"error\\"', "has no state"),
        ("_seconds_bucket", "_seconds_buckets", "is not exposed"),
        ("{{worker_id}}", "{{worker}}", "the legend has no worker"),
    ],
)
def test_a_wrong_panel_is_found(page: str, old: str, new: str, complaint: str) -> None:
    text = DASHBOARD.read_text(encoding="utf-8")
    assert old in text
    assert complaint in str(wrong_panels(json.loads(text.replace(old, new, 1)), read(page)))


def test_a_panel_whose_metric_is_gone_is_found(page: str) -> None:
    dashboard, exposed = json.loads(DASHBOARD.read_text(encoding="utf-8")), read(page)
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", ())]
    for name in {name for target in targets for name, _ in selected(target["expr"])}:
        missing = copy.copy(exposed)
        del missing[name]
        assert wrong_panels(dashboard, missing), name


def test_our_dashboard_is_one_that_grafana_takes() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time"} <= dashboard.keys()
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", dashboard["uid"])
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "model"]
    panels = dashboard["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    places: set[tuple[int, int]] = set()
    for panel in panels:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {(grid["x"] + x, grid["y"] + y) for x in range(grid["w"]) for y in range(grid["h"])}
        assert not cells & places, f"{panel['title']} lies over another"
        places |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
            assert target["expr"].count("(") == target["expr"].count(")")


def test_what_dynamos_dashboards_look_at_is_exposed(page: str) -> None:
    exposed = read(page)
    for line in DYNAMOS.split():
        name, labels = line.removesuffix("}").split("{")
        assert name in exposed, name
        assert set(labels.split(",")) <= exposed[name], name


def test_workers_decode_as_backend_and_prefill_as_prefill(page: str) -> None:
    taken = re.findall(r'requests_total{dynamo_component="(\w+)",dynamo_endpoint="generate"', page)
    assert set(taken) == {"backend", "prefill"}


def test_every_metric_names_a_worker_in_the_same_way(page: str) -> None:
    """Hex digits, as in logs and answers."""
    by_metric: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.labels.get("dynamo_endpoint", "generate") == "generate" and "worker_id" in sample.labels:
                by_metric.setdefault(sample.name, set()).add(sample.labels["worker_id"])
    known = by_metric["dynamo_component_model_load_time_seconds"]
    assert len(known) == 3
    assert len(by_metric) > 10
    assert {name for name, ids in by_metric.items() if not ids <= known} == set()
