"""Arguments of a mock engine as texts from a command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from engines import as_engine
from engines.mocker import MockEngine, MockEngineArgs, ReasoningArgs, SglangArgs
from pipeline import Context, InvalidArgument
from pipeline.protocols import PreprocessedRequest, StopConditions
from serving.deployment import find_engine
from serving.deployment.engines import Deployment

PREFILL_MS, DECODE_MS = 50.0, 7.0


async def built(**texts: str) -> MockEngine:
    engine = await find_engine("mocker").build(texts, Deployment())
    assert isinstance(engine, MockEngine)
    return engine


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A timing model with constant times."""
    numpy: Any = pytest.importorskip("numpy")
    numpy.savez(
        tmp_path / "measured.npz",
        prefill_isl=[1.0, 1000.0],
        prefill_ttft_ms=[PREFILL_MS, PREFILL_MS],
        decode_active_kv_tokens=[0.0, 1000.0],
        decode_context_length=[1.0, 1000.0],
        decode_itl=[[DECODE_MS, DECODE_MS], [DECODE_MS, DECODE_MS]],
    )
    return tmp_path


@pytest.mark.parametrize("name", ["", "measured.npz"])
async def test_measured_times_of_a_file_or_its_folder_are_those_of_the_passes(profile: Path, name: str) -> None:
    request = PreprocessedRequest([1, 2, 3], stop_conditions=StopConditions(max_tokens=4))
    async with as_engine(await built(planner_profile_data=str(profile / name))) as served:
        begun_s = anyio.current_time()
        await (await served.generate(Context(request))).collect()
        assert (anyio.current_time() - begun_s) * 1000 == pytest.approx(PREFILL_MS + 4 * DECODE_MS)


async def test_a_path_is_kept_as_text() -> None:
    args = MockEngineArgs(planner_profile_data=Path("a") / "b", response_replay_trace_path=Path("c"))
    assert (args.planner_profile_data, args.response_replay_trace_path) == (str(Path("a/b")), "c")
    assert MockEngineArgs.from_plain(args.to_plain()) == args
    assert (await built(planner_profile_data="none")).args.planner_profile_data is None


async def test_records_are_json_objects() -> None:
    engine = await built(
        engine_type="SGLang",
        sglang='{"page_size": 4, "schedule_policy": "lpm"}',
        reasoning='{"start_thinking_token_id": 1, "end_thinking_token_id": 2, "thinking_ratio": 0.5}',
    )
    args = engine.args
    assert args.sglang == SglangArgs(page_size=4, schedule_policy="lpm")
    assert args.reasoning == ReasoningArgs(start_thinking_token_id=1, end_thinking_token_id=2, thinking_ratio=0.5)
    assert args.block_size == 4


@pytest.mark.parametrize(
    ("texts", "field"),
    [
        ({"sglang": '{"pages": 4}'}, "engine_args.sglang"),
        ({"sglang": "lpm"}, "engine_args.sglang"),
        ({"sglang": '{"schedule_policy": "best"}'}, "engine_args.sglang"),
        ({"engine_type": "sglang", "sglang": '{"page_size": 0}'}, "engine_args.sglang.page_size"),
        ({"reasoning": '{"thinking_ratio": 0.5}'}, "engine_args.reasoning"),
        ({"aic_backend": "vllm"}, "engine_args.aic_backend"),
        ({"watermark": "much"}, "engine_args.watermark"),
    ],
)
async def test_what_is_wrong_is_named(texts: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await built(**texts)
    assert refused.value.field == field


@pytest.mark.parametrize("name", ["planner_profile_data", "response_replay_trace_path"])
async def test_a_file_that_is_not_there_ends_the_start(tmp_path: Path, name: str) -> None:
    engine = await built(**{name: str(tmp_path / "nothing")})
    with pytest.raises(InvalidArgument) as refused:
        await engine.start(0)
    assert refused.value.field == name
