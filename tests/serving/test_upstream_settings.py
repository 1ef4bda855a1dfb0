"""Settings of a graph in front of servers: what cannot be is refused by name, and what is secret is not shown."""

from __future__ import annotations

from typing import Any

import pytest

from operators.kv import KvRouterConfig
from pipeline import InvalidArgument
from serving.deployment import GraphConfig, UpstreamConfig
from tests.serving.upstream_worlds import ONE, TWO, Site


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"urls": ()}, "upstream"),
        ({"urls": (), "prefill_urls": (ONE,)}, "upstream"),
        ({"urls": (ONE, TWO, f"{ONE}/v1")}, "upstream"),
        ({"urls": (ONE,), "prefill_urls": (ONE,)}, "prefill_upstream"),
        ({"urls": ("gpu-1:8000",)}, "upstream"),
        ({"urls": (ONE,), "prefill_urls": ("ftp://x",)}, "prefill_upstream"),
        ({"urls": (ONE,), "kind": "tgi"}, "kind"),
    ],
)
def test_servers_that_cannot_be_are_refused_by_name(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        UpstreamConfig(**settings)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"engine": "mocker"}, "engine"),
        ({"workers": 2}, "workers"),
        ({"prefill_workers": 1}, "prefill_workers"),
        ({"enforce_disagg": True}, "enforce_disagg"),
        ({"router": "kv", "kv_router": KvRouterConfig(min_initial_workers=2)}, "min_initial_workers"),
        ({"router": "kv", "kv_router": KvRouterConfig(conditional_disagg_enabled=True)}, "conditional_disagg_enabled"),
    ],
)
def test_what_does_not_go_with_servers_is_refused_by_name(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        GraphConfig(upstream=UpstreamConfig(urls=(ONE,)), **settings)
    assert caught.value.field == field


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(UpstreamConfig(urls=(ONE,), api_key="secret"))


async def test_a_key_with_a_line_end_is_not_shown_either(site: Site) -> None:
    site.server(ONE)
    async with site.graph(servers={"api_key": "secret\n"}) as opened:
        assert [one.problem for one in opened.supervisors] == [None]
