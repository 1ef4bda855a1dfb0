"""The picture of a request's way: drawn from the spans of a graph that runs, the same in every run."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from benchmarks.request_path import outline, picture, request_steps
from pipeline.testing import run_in_virtual_time

ROOT = Path(__file__).parents[2]


def test_stages_are_nested_as_they_call_each_other() -> None:
    lines = outline(run_in_virtual_time(request_steps, backend="asyncio")).splitlines()
    depths = {line.split()[0]: len(line) - len(line.lstrip()) for line in reversed(lines)}
    order = ["POST", "Preprocess", "Migration", "Detokenize", "PrefillRouter", "prefill", "KvPushRouter", "PushRouter"]
    assert [depths[name] for name in order] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert depths["decode"] == depths["prefill"]


def test_each_step_is_in_a_file_of_the_product_and_ends_after_it_began() -> None:
    for step in run_in_virtual_time(request_steps, backend="asyncio").values():
        assert (ROOT / step.file).is_file(), step
        assert step.end_s >= step.begin_s


def test_the_picture_is_well_formed_and_the_same_in_every_run() -> None:
    one, two = (picture(run_in_virtual_time(request_steps, backend="asyncio")) for _ in range(2))
    assert one == two
    assert "PrefillRouter" in "".join(ElementTree.fromstring(one).itertext())
