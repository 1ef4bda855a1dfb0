"""A model of time for mock engines, and the check that an engine holds nothing."""

from __future__ import annotations

from engines.mocker import MockEngine


class Steady:
    """Takes 10 ms for a prompt and 20 ms for a token."""

    def prefill_ms(self, batch: int, mean_prompt_tokens: int, mean_cached_tokens: int) -> float:
        return 10.0 if batch else 0.0

    def decode_ms(self, batch: int, active_kv_tokens: int, total_kv_tokens: int, mean_context_tokens: int) -> float:
        return 20.0


def assert_empty(engine: MockEngine) -> None:
    """No rank holds a block or a request."""
    for rank in engine.ranks:
        rank.scheduler.pool.check()
        assert rank.scheduler.pool.active == 0
        assert rank.scheduler.is_idle
        assert rank.live == 0
