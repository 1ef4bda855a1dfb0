"""What is known of a server, and where its events are reached."""

from __future__ import annotations

import pytest

from engines.upstream import EventSource, ServerFacts


@pytest.mark.parametrize(
    ("endpoint", "host", "reached"),
    [
        ("tcp://*:5557", "gpu-1", "tcp://gpu-1:5557"),
        ("tcp://0.0.0.0:5557", "10.0.0.9", "tcp://10.0.0.9:5557"),
        ("tcp://[::]:5557", "gpu-1", "tcp://gpu-1:5557"),
        ("tcp://:::5557", "gpu-1", "tcp://gpu-1:5557"),
        ("tcp://*:5557", "fd00::7", "tcp://[fd00::7]:5557"),
        ("tcp://gpu-2:5557", "gpu-1", "tcp://gpu-2:5557"),
        ("tcp://[fd00::8]:5557", "gpu-1", "tcp://[fd00::8]:5557"),
        ("ipc:///run/kv", "gpu-1", "ipc:///run/kv"),
    ],
)
def test_an_address_of_every_interface_is_that_of_the_server(endpoint: str, host: str, reached: str) -> None:
    source = EventSource(endpoint, endpoint, "kv").at(host)
    assert source == EventSource(reached, reached, "kv")
    assert EventSource(endpoint).at(host).replay_endpoint is None


def test_what_is_advertised_is_what_was_found() -> None:
    sources = {4: EventSource("tcp://gpu-1:5557")}
    facts = ServerFacts(model="m", aliases=("n",), data_parallel_start_rank=4, data_parallel_size=2)
    config = facts.config()
    assert (config.model, config.model_aliases) == ("m", ["n"])
    assert (config.data_parallel_start_rank, config.data_parallel_size, [*facts.ranks]) == (4, 2, [4, 5])
    assert config.publishes_kv_events is False, "it names no source of them"
    assert ServerFacts(model="m", event_sources=sources).config().publishes_kv_events is None
