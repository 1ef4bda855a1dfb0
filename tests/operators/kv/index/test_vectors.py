"""The index after scripts of events that were run through the original library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from operators.kv import KvIndex
from operators.kv.index import KvIndexError
from pipeline.protocols.kv import KvEvent, KvStored, RouterEvent
from pipeline.wire import from_plain

SCRIPTS = json.loads((Path(__file__).parents[1] / "vectors" / "event_scripts.json").read_text(encoding="utf-8"))[
    "items"
]


def run(index: KvIndex, step: dict[str, Any]) -> str:
    """What the index answers to one step."""
    if step["op"] == "remove_worker":
        index.remove_worker(step["worker_id"])
    elif step["op"] == "clear_all_blocks":
        index.clear_worker(step["worker_id"])
    else:
        try:
            index.apply(RouterEvent(step["worker_id"], from_plain(step["event"], KvEvent)))
        except KvIndexError as error:
            return type(error).__name__
    return "ok"


def rows(index: KvIndex) -> list[list[int | None]]:
    found: list[list[int | None]] = []
    for event in index.dump():
        change = event.event.data
        assert isinstance(change, KvStored)
        parents = [change.parent_hash, *(block.block_hash for block in change.blocks)]
        for parent, block in zip(parents, change.blocks, strict=False):
            found.append([event.worker_id, event.event.dp_rank, parent, block.block_hash, block.tokens_hash])
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script["id"])
def test_the_index_gives_the_results_of_the_original(script: dict[str, Any]) -> None:
    index = KvIndex()
    for step in script["ops"]:
        assert run(index, step) == step.get("outcome", "ok")
    for query in script["queries"]:
        scores = [[*rank, depth] for rank, depth in index.find_matches(query["sequence"]).items()]
        assert sorted(scores) == query["scores"]
    assert sorted(map(str, rows(index))) == sorted(map(str, script["tree"]))
