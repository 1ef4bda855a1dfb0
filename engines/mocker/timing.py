"""How long a pass takes: models from the shape of a batch to milliseconds.

Source: dynamo lib/mocker/src/common/perf_model.rs. Other than there, all constants are one table, and the figures of
other engines come in through one protocol.
"""

from __future__ import annotations

from typing import Protocol

from attrs import frozen

DECODE_FLOOR_MS = 1.0
"""No decode step takes less, so no two tokens of a sequence come at once."""


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
    """Says how long the two phases of a pass take; nothing of the speed-up is in it. What it raises ends the pass."""

    def prefill_ms(self, batch: int, mean_prompt_tokens: int, mean_cached_tokens: int) -> float:
        """Time to compute what is not cached of so many prompts."""
        ...

    def decode_ms(self, batch: int, active_kv_tokens: int, total_kv_tokens: int, mean_context_tokens: int) -> float:
        """Time of the next token of so many sequences, with so much of the cache in use."""
        ...


def new_tokens(batch: int, mean_prompt_tokens: int, mean_cached_tokens: int) -> int:
    """Prompt tokens a batch has to compute."""
    return batch * max(0, mean_prompt_tokens - mean_cached_tokens)


def share_in_use(active_kv_tokens: int, total_kv_tokens: int) -> float:
    """The part of the cache in use, from 0 to 1; all of it where there is none."""
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
    """Somebody else's model of a real engine; its errors come through."""

    def predict_prefill(self, batch: int, new_tokens: int, prefix_tokens: int) -> float: ...
    def predict_decode(self, batch: int, context_tokens: int, output_tokens: int) -> float: ...


@frozen
class PredictedTiming:
    """Asks a predictor."""

    predictor: Predictor

    def prefill_ms(self, batch: int, mean_prompt_tokens: int, mean_cached_tokens: int) -> float:
        tokens = new_tokens(1, mean_prompt_tokens, mean_cached_tokens)
        return max(0.0, self.predictor.predict_prefill(batch, tokens, mean_cached_tokens)) if batch and tokens else 0.0

    def decode_ms(self, batch: int, active_kv_tokens: int, total_kv_tokens: int, mean_context_tokens: int) -> float:
        # The predictor averages over the tokens it is told to generate: with two it gives the time of one step.
        return max(DECODE_FLOOR_MS, self.predictor.predict_decode(batch, mean_context_tokens, 2))


@frozen
class PassTime:
    """The time of a pass from its two phases, as fast as asked for; a speed-up of 0 means that nothing takes time."""

    model: TimingModel
    speedup: float = 1.0
    decode_speedup: float = 1.0

    def prefill_ms(self, batch: int, prompt_tokens: int, cached_tokens: int) -> float:
        """Of so many prompts, given the sums of their tokens."""
        if not batch or not self.speedup:
            return 0.0
        return self.model.prefill_ms(batch, prompt_tokens // batch, cached_tokens // batch) / self.speedup

    def decode_ms(self, batch: int, active_kv_tokens: int, total_kv_tokens: int, context_tokens: int) -> float:
        """Of so many sequences, given the sum of their lengths."""
        speedup = self.speedup * self.decode_speedup
        if not batch or not speedup:
            return 0.0
        return self.model.decode_ms(batch, active_kv_tokens, total_kv_tokens, context_tokens // batch) / speedup
