"""Synthetic load: requests of one length that arrive evenly, at random or all at once.

Source: dynamo lib/mocker/src/loadgen/trace.rs, Trace::synthetic. Other than there, ids of shared blocks are not cut to
32 bits, so two groups never share a block.
"""

from __future__ import annotations

import math
from random import Random

from attrs import frozen

from pipeline import InvalidArgument

from .trace import Prompt, Session, SharedPrefixes, Trace, Turn, check_block_size


@frozen
class SyntheticLoad:
    """Sessions of requests that all have the same lengths. Raise InvalidArgument for an invalid setting.

    Without `arrival_interval_ms` and `request_rate` all sessions begin at once.
    """

    input_tokens: int
    """Of each prompt; its blocks are new but for the shared ones."""
    output_tokens: int
    """Of each answer."""
    request_count: int
    """Sessions."""
    turns: int = 1
    """Requests of a session."""
    shared_prefix_ratio: float = 0.0
    """Part of the blocks of a prompt that all requests of a group share, 0 to 1."""
    num_prefix_groups: int = 0
    """Groups, from which each session draws one. 0: nothing is shared."""
    inter_turn_delay_ms: float = 0.0
    """Between the end of a turn and the next one."""
    arrival_interval_ms: float | None = None
    """Between the first turns of sessions."""
    request_rate: float | None = None
    """First turns a second on average, at random times."""
    seed: int = 42
    trace_block_size: int = 512
    """Tokens of a hash id."""

    def __attrs_post_init__(self) -> None:
        for name, low in (("input_tokens", 1), ("output_tokens", 0), ("request_count", 1), ("turns", 1)):
            if getattr(self, name) < low:
                raise InvalidArgument(f"must be at least {low}, got {getattr(self, name)}", field=name)
        check_block_size(self.trace_block_size)
        for name in ("inter_turn_delay_ms", "arrival_interval_ms"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise InvalidArgument(f"must be finite and not negative, got {value}", field=name)
        if self.request_rate is not None and not 0 < self.request_rate < math.inf:
            raise InvalidArgument(f"must be finite and above 0, got {self.request_rate}", field="request_rate")
        if None not in (self.request_rate, self.arrival_interval_ms):
            raise InvalidArgument("give either this or arrival_interval_ms", field="request_rate")
        SharedPrefixes(self.shared_prefix_ratio, self.num_prefix_groups)

    def make(self) -> Trace:
        """Return the trace; equal settings give equal traces."""
        rng = Random(self.seed)
        prefixes = SharedPrefixes(self.shared_prefix_ratio, self.num_prefix_groups)
        sessions, arrival_ms = [], 0.0
        for index in range(self.request_count):
            if index and self.request_rate is not None:
                arrival_ms += rng.expovariate(self.request_rate) * 1000.0
            elif index:
                arrival_ms += self.arrival_interval_ms or 0.0
            group = rng.randrange(prefixes.groups) if prefixes.are_shared else None
            turns = tuple(self._turn(f"session_{index}", at, prefixes, group) for at in range(self.turns))
            sessions.append(Session(f"session_{index}", turns, arrival_ms))
        return Trace(tuple(sessions))

    def _turn(self, session: str, at: int, prefixes: SharedPrefixes, group: int | None) -> Turn:
        blocks = -(-self.input_tokens // self.trace_block_size)
        ids = prefixes.blocks(blocks, prefixes.shared_blocks(blocks), group)
        prompt = Prompt.of(ids, self.trace_block_size, self.input_tokens)
        return Turn(f"{session}:{at}", 0, prompt, self.output_tokens, self.inter_turn_delay_ms if at else 0.0)
