"""How long a step takes: models from the shape of a batch to milliseconds.

Source: dynamo lib/mocker/src/common/perf_model.rs. Other than there, all constants are one table, and the figures of
other engines come in through one protocol.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import pairwise, repeat
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen

from pipeline import InvalidArgument

DECODE_FLOOR_MS = 1.0
"""No decode step takes less, so two tokens of a sequence never come at once."""


@frozen
class Quadratic:
    """a·x² + b·x + c."""

    a: float
    b: float
    c: float

    def __call__(self, x: float) -> float:
        return self.a * x * x + self.b * x + self.c


# What it is of: prefill milliseconds by new tokens, decode milliseconds by the share of the cache in use (0 to 1).
PREFILL_MS = Quadratic(4.209989e-07, 1.518344e-02, 16.50142)
DECODE_MS = Quadratic(-25.74, 54.01, 5.74)
CLASSIC_PREFILL_MS = Quadratic(1.25e-6, 7.41e-2, 26.2)
CLASSIC_DECODE_MS = Quadratic(-5.47, 43.88, 19.44)


class TimingModel(Protocol):
    """The time of the two phases of a step, without any speed-up. What it raises ends the requests of the rank."""

    def prefill_ms(self, batch: int, mean_prompt_tokens: int, mean_cached_tokens: int) -> float:
        """Return the milliseconds to compute the parts of `batch` prompts that are not cached."""
        ...

    def decode_ms(self, batch: int, active_kv_tokens: int, total_kv_tokens: int, mean_context_tokens: int) -> float:
        """Return the milliseconds of the next token of `batch` sequences, with that much of the cache in use."""
        ...


def new_tokens(batch: int, mean_prompt_tokens: int, mean_cached_tokens: int) -> int:
    """Return the prompt tokens that a batch has to compute."""
    return batch * max(0, mean_prompt_tokens - mean_cached_tokens)


def share_in_use(active_kv_tokens: int, total_kv_tokens: int) -> float:
    """Return the share of the cache in use, from 0 to 1; 1 for a cache without tokens."""
    return min(1.0, active_kv_tokens / total_kv_tokens) if total_kv_tokens > 0 else 1.0


class PolynomialTiming:
    """The default: one quadratic of the batch's new tokens, one of the cache in use."""

    def prefill_ms(self, batch: int, mean_prompt_tokens: int, mean_cached_tokens: int) -> float:
        tokens = new_tokens(batch, mean_prompt_tokens, mean_cached_tokens)
        return PREFILL_MS(tokens) if tokens else 0.0

    def decode_ms(self, batch: int, active_kv_tokens: int, total_kv_tokens: int, mean_context_tokens: int) -> float:
        return max(DECODE_FLOOR_MS, DECODE_MS(share_in_use(active_kv_tokens, total_kv_tokens)))


class ClassicTiming:
    """The model of the first releases: prompts are paid for one by one, here each at the mean length."""

    def prefill_ms(self, batch: int, mean_prompt_tokens: int, mean_cached_tokens: int) -> float:
        tokens = new_tokens(1, mean_prompt_tokens, mean_cached_tokens)
        return batch * CLASSIC_PREFILL_MS(tokens) if tokens else 0.0

    def decode_ms(self, batch: int, active_kv_tokens: int, total_kv_tokens: int, mean_context_tokens: int) -> float:
        return CLASSIC_DECODE_MS(share_in_use(active_kv_tokens, total_kv_tokens))


class Predictor(Protocol):
    """An external model of a real engine; its errors go to the caller."""

    def predict_prefill(self, batch: int, new_tokens: int, prefix_tokens: int) -> float: ...
    def predict_decode(self, batch: int, context_tokens: int, output_tokens: int) -> float: ...


@frozen
class PredictedTiming:
    """The times of an external predictor."""

    predictor: Predictor

    def prefill_ms(self, batch: int, mean_prompt_tokens: int, mean_cached_tokens: int) -> float:
        tokens = new_tokens(1, mean_prompt_tokens, mean_cached_tokens)
        return max(0.0, self.predictor.predict_prefill(batch, tokens, mean_cached_tokens)) if batch and tokens else 0.0

    def decode_ms(self, batch: int, active_kv_tokens: int, total_kv_tokens: int, mean_context_tokens: int) -> float:
        # The predictor averages over the tokens to generate: with two it returns the time of one step.
        return max(DECODE_FLOOR_MS, self.predictor.predict_decode(batch, mean_context_tokens, 2))


@frozen
class StepTime:
    """The time of a step from its two phases, divided by the speed-up; with a speed-up of 0 nothing takes time."""

    model: TimingModel
    speedup: float = 1.0
    decode_speedup: float = 1.0

    def prefill_ms(self, batch: int, prompt_tokens: int, cached_tokens: int) -> float:
        """Return the milliseconds of `batch` prompts, given the sums of their tokens."""
        if not batch or not self.speedup:
            return 0.0
        return self.model.prefill_ms(batch, prompt_tokens // batch, cached_tokens // batch) / self.speedup

    def decode_ms(self, batch: int, active_kv_tokens: int, total_kv_tokens: int, context_tokens: int) -> float:
        """Return the milliseconds of `batch` sequences, given the sum of their lengths."""
        speedup = self.speedup * self.decode_speedup
        if not batch or not speedup:
            return 0.0
        return self.model.decode_ms(batch, active_kv_tokens, total_kv_tokens, context_tokens // batch) / speedup

    def decodes_ms(
        self, batch: int, active_kv_tokens: int, total_kv_tokens: int, context_tokens: int, steps: int
    ) -> Iterable[float] | None:
        """Return the same for that many steps, each with `batch` more tokens than the one before.

        None for a model that may have a state or raise errors: it is to be called when its step begins.
        """
        if type(self.model) in (PolynomialTiming, ClassicTiming):  # the length of the context makes no difference
            return repeat(self.decode_ms(batch, active_kv_tokens, total_kv_tokens, context_tokens), steps)
        if type(self.model) is not InterpolatedTiming:
            return None
        contexts = range(context_tokens, context_tokens + steps * batch, batch)
        return [self.decode_ms(batch, active_kv_tokens, total_kv_tokens, tokens) for tokens in contexts]


FILE_NAME = "perf_data.npz"
"""Name of the file in a folder with more than one NPZ file."""

_FIELD = "planner_profile_data"
_LINES = ("prefill_isl", "prefill_ttft_ms", "decode_active_kv_tokens", "decode_context_length")
_GRID = "decode_itl"


@frozen
class InterpolatedTiming:
    """Times of a real engine: prefill over new tokens, decode over a grid of tokens in the cache and context length.

    The rows of the grid are for the cache, its columns for the context. Linear between the points and, by the nearest
    two, beyond them; never below 0 and 1 ms.
    Source: dynamo lib/mocker/src/common/perf_model.rs, PerfModel::from_npz.
    """

    prefill_tokens: Sequence[float]
    prefill_times_ms: Sequence[float]
    kv_tokens: Sequence[float]
    context_tokens: Sequence[float]
    decode_times_ms: Sequence[Sequence[float]]

    @classmethod
    def load(cls, path: str | Path) -> InterpolatedTiming:
        """Read an NPZ file, or the one in a folder.

        Raises InvalidArgument for a missing file, one without its arrays, with arrays that do not fit each other or
        with numbers that are not finite, and where numpy, the extra named `profile`, is not installed.
        """
        arrays = _read(_find(Path(path)))
        lines = [_line(arrays, name) for name in _LINES]
        grid = _array(arrays, _GRID)
        _require(len(lines[0]) == len(lines[1]), "prefill_isl and prefill_ttft_ms differ in length")
        _require(grid.shape == (len(lines[2]), len(lines[3])), f"{_GRID} has the shape {grid.shape}, its axes do not")
        for name, axis in zip(_LINES, lines, strict=True):
            if name != "prefill_ttft_ms":
                _require(len(axis) >= 2, f"{name} has less than two points")
                _require(all(low < high for low, high in pairwise(axis)), f"{name} does not increase")
        return cls(lines[0], lines[1], lines[2], lines[3], grid.tolist())

    def prefill_ms(self, batch: int, mean_prompt_tokens: int, mean_cached_tokens: int) -> float:
        tokens = new_tokens(batch, mean_prompt_tokens, mean_cached_tokens)
        if not tokens:
            return 0.0
        index, part = _between(self.prefill_tokens, tokens)
        times = self.prefill_times_ms
        return max(0.0, _mix(times[index], times[index + 1], part))

    def decode_ms(self, batch: int, active_kv_tokens: int, total_kv_tokens: int, mean_context_tokens: int) -> float:
        row, down = _between(self.kv_tokens, active_kv_tokens)
        column, right = _between(self.context_tokens, mean_context_tokens)
        above, below = (_mix(times[column], times[column + 1], right) for times in self.decode_times_ms[row : row + 2])
        return max(DECODE_FLOOR_MS, _mix(above, below, down))


def _between(axis: Sequence[float], x: float) -> tuple[int, float]:
    """The two neighbouring points of an axis (the index of the first one), and how far x is from one to the other."""
    index = min(max(bisect_right(axis, x) - 1, 0), len(axis) - 2)
    return index, (x - axis[index]) / (axis[index + 1] - axis[index])


def _mix(low: float, high: float, part: float) -> float:
    return low + (high - low) * part


def _find(path: Path) -> Path:
    if not path.is_dir():
        return path
    files = sorted(path.glob("*.npz"))
    if len(files) > 1:
        files = [file for file in files if file.name == FILE_NAME]
    _require(len(files) == 1, f"{path} has no NPZ file, or several and none of the name {FILE_NAME}")
    return files[0]


def _read(path: Path) -> dict[str, Any]:
    try:
        numpy: Any = import_module("numpy")
    except ModuleNotFoundError as error:
        raise InvalidArgument("needs numpy: install penstock[profile]", field=_FIELD, cause=error) from error
    try:
        with numpy.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in (*_LINES, _GRID) if name in arrays.files}
    # The error of numpy for a file of another kind depends on its first bytes.
    except Exception as error:
        raise InvalidArgument(f"cannot read {path}: {error}", field=_FIELD, cause=error) from error


def _array(arrays: dict[str, Any], name: str) -> Any:
    _require(name in arrays, f"has no array {name}")
    array = arrays[name]
    _require(array.dtype.kind in "iuf", f"{name} has no numbers")
    _require(all(map(isfinite, array.flat)), f"{name} has a number that is not finite")
    return array


def _line(arrays: dict[str, Any], name: str) -> list[float]:
    array = _array(arrays, name)
    _require(array.ndim == 1, f"{name} is not a list of numbers")
    values: list[float] = array.tolist()
    return values


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidArgument(message, field=_FIELD)
