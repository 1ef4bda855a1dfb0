"""`open_streams` finds every stream that a test leaves unclosed, and no other, on both loops."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import anyio
import pytest

from pipeline import Context, StreamClosed
from pipeline.testing import ScriptedEngine, Wait, watch_streams

PLANTED = Path(__file__).with_name("planted_leaks.py")


LEFT = "Failed: streams were left unclosed:"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, set[str]]:
    """What became of each planted test: its name and loop -> the outcomes of its phases, with the reason of errors."""
    command = [sys.executable, "-m", "pytest", str(PLANTED), "-rA", "--tb=no", "-p", "no:cacheprovider"]
    environment = {**os.environ, "COLUMNS": "300"}  # a narrow terminal would cut the reasons off
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, cwd=PLANTED.parents[2], env=environment
    )
    found: dict[str, set[str]] = {}
    for outcome, name, reason in re.findall(
        r"^(PASSED|FAILED|ERROR) \S*?::(\S+)(?: - (.*))?$", ran.stdout, re.MULTILINE
    ):
        found.setdefault(name, set()).add(reason or outcome)
    assert found, ran.stdout + ran.stderr
    return found


def test_every_planted_leak_fails_its_test(outcomes: dict[str, set[str]]) -> None:
    leaks = {name: seen for name, seen in outcomes.items() if name.startswith("test_leak")}
    assert len(leaks) > 50
    assert {name: seen for name, seen in leaks.items() if seen != {"PASSED", LEFT}} == {}


def test_a_test_that_leaves_nothing_open_passes(outcomes: dict[str, set[str]]) -> None:
    clean = {name: seen for name, seen in outcomes.items() if name.startswith("test_clean")}
    assert len(clean) > 25
    assert {name: seen for name, seen in clean.items() if seen != {"PASSED"}} == {}


async def test_an_unclosed_stream_is_named_with_what_became_of_it() -> None:
    engine = ScriptedEngine([1, 2, 3])
    with watch_streams() as streams, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        await engine.generate(Context(None, id="dropped"))
        kept = await engine.generate(Context(None, id="kept"))
        assert await anext(kept) == 1
        assert streams.unclosed == [
            "stream of request 'dropped' (dropped behind 0 items)",
            "stream of request 'kept' (still open behind 1 items)",
        ]
        await kept.aclose()
        assert streams.unclosed == ["stream of request 'dropped' (dropped behind 0 items)"]
        assert streams.open == []


async def test_a_stream_cut_off_with_its_reader_is_unclosed_until_it_is_closed() -> None:
    with watch_streams() as streams:
        stream = await ScriptedEngine([1, Wait(10), 2]).generate(Context(None, id="cut"))
        with anyio.move_on_after(1):
            assert [item async for item in stream] == []
        assert not stream.is_open
        assert streams.unclosed == ["stream of request 'cut' (cut off with its reader or its loop behind 1 items)"]
        await stream.aclose()
        assert streams.unclosed == []


async def test_a_watched_stream_is_read_as_any_other() -> None:
    with watch_streams():
        async with await ScriptedEngine([1]).generate(Context(None)) as stream:
            read = anext(stream)
            del read  # never awaited, and no warning of it: it is no coroutine
            assert await anext(stream) == 1
            assert await anext(stream, None) is None
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        with pytest.raises(StreamClosed):
            await anext(stream)
