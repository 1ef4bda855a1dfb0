"""Timing models of passes: the constants, their limits, and measured figures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from engines import as_engine
from engines.mocker import (
    ClassicTiming,
    InterpolatedTiming,
    MockEngine,
    MockEngineArgs,
    PolynomialTiming,
    PredictedTiming,
)
from engines.mocker.timing import StepTime
from pipeline import AsyncEngine, Context, InvalidArgument
from pipeline.protocols import PreprocessedRequest, StopConditions
from pipeline.testing import run_in_virtual_time

POLYNOMIAL, CLASSIC = PolynomialTiming(), ClassicTiming()


def test_the_default_model_has_the_reference_values() -> None:
    assert POLYNOMIAL.prefill_ms(1, 128, 0) == pytest.approx(18.4518, abs=1e-4)
    assert POLYNOMIAL.prefill_ms(1, 1000, 0) == pytest.approx(32.1059, abs=1e-4)
    assert [POLYNOMIAL.decode_ms(1, used, 100, 7) for used in (0, 50, 100)] == pytest.approx([5.74, 26.31, 34.01])


def test_the_classic_model_has_the_reference_values() -> None:
    assert CLASSIC.prefill_ms(1, 64, 0) == pytest.approx(30.94752)
    assert CLASSIC.prefill_ms(1, 1000, 0) == pytest.approx(101.55)
    assert [CLASSIC.decode_ms(1, used, 100, 7) for used in (0, 50, 100)] == pytest.approx([19.44, 40.0125, 57.85])


def test_the_classic_model_pays_for_each_prompt() -> None:
    assert CLASSIC.prefill_ms(3, 64, 0) == pytest.approx(3 * CLASSIC.prefill_ms(1, 64, 0))


def test_a_batch_costs_as_one_prompt_of_all_its_new_tokens() -> None:
    assert POLYNOMIAL.prefill_ms(4, 300, 50) == POLYNOMIAL.prefill_ms(1, 1000, 0)


@pytest.mark.parametrize("model", [POLYNOMIAL, CLASSIC])
def test_no_new_tokens_take_no_time(model: PolynomialTiming | ClassicTiming) -> None:
    assert model.prefill_ms(3, 128, 128) == 0
    assert model.prefill_ms(3, 100, 128) == 0, "means are rounded: there may seem to be more cached than there is"


def test_a_cache_without_capacity_counts_as_full() -> None:
    assert POLYNOMIAL.decode_ms(1, 0, 0, 1) == pytest.approx(34.01)


def test_more_in_use_than_there_is_counts_as_full() -> None:
    assert POLYNOMIAL.decode_ms(1, 500, 100, 1) == pytest.approx(34.01)


@given(st.floats(0, 1))
def test_a_decode_step_never_takes_less_than_a_millisecond(share: float) -> None:
    assert POLYNOMIAL.decode_ms(1, round(share * 10**6), 10**6, 1) >= 1


def test_a_speed_up_divides() -> None:
    assert StepTime(POLYNOMIAL, 10).prefill_ms(1, 128, 0) == pytest.approx(1.84518, abs=1e-5)
    assert StepTime(POLYNOMIAL, 10, 2).prefill_ms(1, 128, 0) == pytest.approx(1.84518, abs=1e-5)
    assert StepTime(POLYNOMIAL, 10, 2).decode_ms(1, 0, 100, 1) == pytest.approx(0.287)


@pytest.mark.parametrize(("speedup", "decode_speedup"), [(0, 1), (1, 0)])
def test_a_speed_up_of_zero_means_no_time_at_all(speedup: float, decode_speedup: float) -> None:
    time = StepTime(POLYNOMIAL, speedup, decode_speedup)
    assert time.decode_ms(1, 50, 100, 1) == 0
    assert (time.prefill_ms(1, 128, 0) == 0) == (speedup == 0)


def test_means_are_whole_tokens() -> None:
    assert StepTime(POLYNOMIAL).prefill_ms(2, 257, 1) == POLYNOMIAL.prefill_ms(2, 128, 0)


class FailingPredictor:
    def predict_prefill(self, batch: int, new_tokens: int, prefix_tokens: int) -> float:
        raise LookupError("no such point")

    def predict_decode(self, batch: int, context_tokens: int, output_tokens: int) -> float:
        raise LookupError("no such point")


class EchoPredictor:
    """Returns its arguments as digits."""

    def predict_prefill(self, batch: int, new_tokens: int, prefix_tokens: int) -> float:
        return batch * 10000 + new_tokens * 100 + prefix_tokens

    def predict_decode(self, batch: int, context_tokens: int, output_tokens: int) -> float:
        return batch * 10000 + context_tokens * 100 + output_tokens


def test_a_predictor_gets_new_tokens_after_a_prefix_and_two_tokens_of_output() -> None:
    timing = PredictedTiming(EchoPredictor())
    assert timing.prefill_ms(3, 30, 20) == 31020
    assert timing.decode_ms(5, 0, 0, 40) == 54002
    assert timing.prefill_ms(3, 20, 20) == 0


def test_an_error_of_a_predictor_comes_through() -> None:
    timing = PredictedTiming(FailingPredictor())
    with pytest.raises(LookupError, match="no such point"):
        timing.prefill_ms(1, 2, 0)
    with pytest.raises(LookupError, match="no such point"):
        timing.decode_ms(1, 2, 3, 4)


MEASURED = InterpolatedTiming([100, 200, 400], [10, 30, 40], [0, 1000], [0, 100, 200], [[2, 4, 8], [10, 20, 40]])


@pytest.mark.parametrize(("tokens", "time_ms"), [(100, 10), (150, 20), (300, 35), (50, 0), (600, 50), (60, 2)])
def test_measured_prefill_is_linear_between_points_and_beyond_them_and_never_negative(
    tokens: int, time_ms: float
) -> None:
    assert MEASURED.prefill_ms(1, tokens, 0) == pytest.approx(time_ms)
    assert MEASURED.prefill_ms(2, 500, 500) == 0


@pytest.mark.parametrize(
    ("kv", "context", "time_ms"),
    [(0, 0, 2), (0, 50, 3), (500, 0, 6), (500, 50, 9), (1000, 150, 30), (2000, 0, 18), (0, 300, 12), (-1000, 0, 1)],
)
def test_measured_decode_is_bilinear_and_never_below_a_millisecond(kv: int, context: int, time_ms: float) -> None:
    assert MEASURED.decode_ms(1, kv, 10**6, context) == pytest.approx(time_ms)


def arrays(**changed: Any) -> dict[str, Any]:
    return {
        "prefill_isl": [100, 200],
        "prefill_ttft_ms": [10.0, 30.0],
        "decode_active_kv_tokens": [0, 1000],
        "decode_context_length": [0, 100, 200],
        "decode_itl": [[2.0, 4.0, 8.0], [10.0, 20.0, 40.0]],
    } | changed


def saved(path: Path, content: dict[str, Any]) -> Path:
    numpy = pytest.importorskip("numpy", reason="numpy is an extra")
    numpy.savez(path, **content)
    return path


def test_measured_times_are_read_from_a_file_or_its_folder(tmp_path: Path) -> None:
    path = saved(tmp_path / "any.npz", arrays())
    assert InterpolatedTiming.load(path) == InterpolatedTiming.load(tmp_path)
    saved(tmp_path / "perf_data.npz", arrays(prefill_ttft_ms=[1.0, 2.0]))
    assert InterpolatedTiming.load(tmp_path).prefill_ms(1, 200, 0) == 2
    assert InterpolatedTiming.load(str(path)).decode_ms(1, 1000, 9, 150) == 30


@pytest.mark.parametrize(
    "changed",
    [
        {"decode_itl": [[2.0, 4.0], [10.0, 20.0]]},
        {"decode_itl": [1.0, 2.0]},
        {"prefill_ttft_ms": [10.0]},
        {"prefill_isl": [200, 100]},
        {"prefill_isl": [[100, 200]]},
        {"prefill_isl": [100], "prefill_ttft_ms": [1.0]},
        {"decode_context_length": ["a", "b", "c"]},
        {"prefill_ttft_ms": [10.0, float("inf")]},
        {"decode_context_length": [0, 100, float("inf")]},
        {"decode_itl": [[2.0, 4.0, 8.0], [10.0, float("nan"), 40.0]]},
    ],
)
def test_measured_arrays_that_do_not_fit_are_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = saved(tmp_path / "perf.npz", arrays(**changed))
    with pytest.raises(InvalidArgument) as caught:
        InterpolatedTiming.load(path)
    assert caught.value.field == "planner_profile_data"


def test_a_file_without_its_arrays_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    content = arrays()
    del content["decode_itl"]
    (tmp_path / "text.npz").write_text("no archive")
    for path in (saved(tmp_path / "perf.npz", content), tmp_path / "text.npz", tmp_path / "missing.npz"):
        with pytest.raises(InvalidArgument):
            InterpolatedTiming.load(path)


def test_a_folder_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no NPZ file"):
        InterpolatedTiming.load(tmp_path)


def test_without_numpy_the_extra_to_install_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(InvalidArgument, match=r"penstock\[profile\]"):
        InterpolatedTiming.load(tmp_path / "perf.npz")


# -- when passes begin and end


Graph: TypeAlias = AsyncEngine[PreprocessedRequest, Any]

ARGS = MockEngineArgs(num_gpu_blocks=64, block_size=4, max_num_batched_tokens=64)


class Steady:
    """Takes no time for prompts, and a constant time for a token."""

    def __init__(self, pass_ms: float) -> None:
        self.pass_ms = pass_ms

    def prefill_ms(self, batch: int, mean_prompt_tokens: int, mean_cached_tokens: int) -> float:
        return 0.0

    def decode_ms(self, batch: int, active_kv_tokens: int, total_kv_tokens: int, mean_context_tokens: int) -> float:
        return self.pass_ms


async def token_times_ms(graph: Graph, outputs: list[int], turns: int = 0) -> list[list[float]]:
    """When each token came, in ms, of requests that are sent one after the other, each as soon as the last has ended.

    In between so many turns of the loop go by, as in the stages of a graph.
    """
    times = []
    for output in outputs:
        for _ in range(turns):
            await checkpoint()
        request = PreprocessedRequest([1, 2, 3], stop_conditions=StopConditions(max_tokens=output))
        async with await graph.generate(Context(request)) as stream:
            times.append([anyio.current_time() * 1000 async for item in stream if item.ok().data.token_ids])
    return times


def times_of(pass_ms: float, *clients: list[int], turns: int = 0) -> list[list[list[float]]]:
    """Return the token times of several clients that use one engine at the same time."""
    found: dict[int, list[list[float]]] = {}

    async def note(graph: Graph, at: int) -> None:
        found[at] = await token_times_ms(graph, clients[at], turns)

    async def main() -> None:
        async with as_engine(MockEngine(ARGS, timing=Steady(pass_ms))) as graph, anyio.create_task_group() as tasks:
            for at in range(len(clients)):
                tasks.start_soon(note, graph, at)

    run_in_virtual_time(main, backend="asyncio")
    return [found[at] for at in range(len(clients))]


@pytest.mark.parametrize("turns", [0, 30])
def test_a_request_that_arrives_as_a_pass_ends_is_in_the_next_pass(turns: int) -> None:
    """A closed loop sends a request the moment another one ends, through as many stages as there may be."""
    long, short = times_of(20.0, [6], [2, 2], turns=turns)
    assert long == [pytest.approx([20, 40, 60, 80, 100, 120])]
    assert short == [pytest.approx([20, 40]), pytest.approx([60, 80])]


def test_passes_of_less_than_a_millisecond_take_their_time_too() -> None:
    assert times_of(0.3, [3, 2]) == [[pytest.approx([0.3, 0.6, 0.9]), pytest.approx([1.2, 1.5])]]


def test_passes_that_take_no_time_come_to_an_end() -> None:
    assert times_of(0.0, [5, 1]) == [[[0.0] * 5, [0.0]]]
