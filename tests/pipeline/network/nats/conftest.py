"""One server for the tests of a process, and asyncio in real time: nats-py has no other loop, sockets no other time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.network.nats.worlds import NatsWorld, running_server

SLOW_OF_THE_CONTRACT = {
    "test_a_quiet_store_repeats_nothing",
    "test_a_held_key_does_not_lapse",
    "test_an_abandoned_key_lapses_within_its_time",
    "test_writing_an_abandoned_key_renews_it",
    "test_a_key_that_lapsed_can_be_created_again",
    "test_a_watch_has_no_gap_and_no_duplicate",
    "test_a_key_lives_as_long_as_its_last_writer",
    "test_a_key_that_another_store_has_deleted_stays_deleted",
    "test_a_watch_after_others_have_ended_begins_with_what_is_there_then",
    "test_a_disposed_watch_receives_nothing_more_and_is_released",
}
"""Tests of every store that wait for its time to live, here in real time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and getattr(item, "originalname", "") in SLOW_OF_THE_CONTRACT:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_server(tmp_path_factory.mktemp("nats")) as url:
        yield url


@pytest.fixture
def world(server_url: str, tmp_path: Path) -> NatsWorld:
    return NatsWorld(server_url, tmp_path)
