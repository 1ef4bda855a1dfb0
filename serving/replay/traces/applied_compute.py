"""Traces of Applied Compute: a whole agentic session a line, given by the lengths of its parts.

    {"num_turns": 1, "input_prompt_length": 900, "assistant_response_length": [40], "tool_call_output_length": [200],
     "tool_call_latency": [1.5], "final_assistant_response_length": 60}

Source: dynamo lib/mocker/src/loadgen/trace.rs, Trace::from_applied_compute_agentic. Other than there, blocks that a
group of sessions shares have ids that no token id cuts short.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import define, field

from .fields import Fields
from .trace import BadLine, Prompt, Session, SharedPrefixes, Turn

_LISTS = ("assistant_response_length", "tool_call_output_length", "tool_call_latency")


@define
class SessionLines:
    """Sessions of these lines, without arrivals.

    Each prompt consists of the one before, its answer and the output of a tool; the tool's latency is the delay.
    """

    block_size_tokens: int
    shared_prefix_ratio: float = 0.0
    """Part of each first prompt that the sessions of a group share, 0 to 1."""
    num_prefix_groups: int = 0
    """Groups; sessions join them in turn. 0: nothing is shared."""
    _prefixes: SharedPrefixes = field(init=False)
    _sessions: list[Session] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self._prefixes = SharedPrefixes(self.shared_prefix_ratio, self.num_prefix_groups)

    def add(self, value: Any, index: int) -> None:
        lengths = list(_lengths(value))
        group = index % self.num_prefix_groups if self._prefixes.are_shared else None
        longest = -(-lengths[-1][0] // self.block_size_tokens)
        shared = self._prefixes.shared_blocks(-(-lengths[0][0] // self.block_size_tokens))
        ids = self._prefixes.blocks(longest, shared, group)
        name = f"applied_compute_agentic_session_{index + 1}"
        turns = [
            Turn(f"{name}:{at}", index + 1, Prompt.of(ids, self.block_size_tokens, prompt), output, delay_ms)
            for at, (prompt, output, delay_ms) in enumerate(lengths)
        ]
        self._sessions.append(Session(name, tuple(turns), is_named=False))

    def finish(self) -> tuple[list[Session], list[BadLine]]:
        return self._sessions, []


def _lengths(value: Any) -> Iterator[tuple[int, int, float]]:
    """Yield the tokens of each prompt and its answer, and the delay before it in ms. Raise InvalidArgument."""
    fields = Fields.of(value)
    turns = fields.needed("num_turns")
    prompt = fields.needed("input_prompt_length", low=1)
    last_answer = fields.needed("final_assistant_response_length")
    answers, outputs = (fields.ids(name, is_needed=True) or () for name in _LISTS[:2])
    seconds = fields.numbers(_LISTS[2])
    for name in _LISTS:
        if isinstance(value.get(name), list) and len(value[name]) != turns:
            fields.problem(f"{name} has {len(value[name])} items, num_turns is {turns}")
    fields.check()
    prompts = [prompt]
    for answer, output in zip(answers, outputs, strict=True):
        prompts.append(prompts[-1] + answer + output)
    delays = [0.0, *(1000.0 * one for one in seconds)]
    yield from zip(prompts, [*answers, last_answer], delays, strict=True)
