"""TraceRow: what one line of a Mooncake trace says, in our names and units.

    {"timestamp": 27000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}

Source: dynamo lib/data-gen/src/mooncake.rs, MooncakeRow and AgenticMooncakeRow. Other than there, all that is wrong
with a line is said at once, hash ids above 32 bits are refused instead of cut, and a plain row that says what only
agentic ones may is refused instead of replayed without it.
"""

from __future__ import annotations

from array import array
from typing import Any

from attrs import frozen

from .fields import Fields, shown

AGENTIC_FIELDS = ("wait_for", "branches", "tool_wait_ms", "prefix_reset")
"""What only rows of the format agentic_mooncake say."""


@frozen
class TraceRow:
    """One request of a trace. Times are in milliseconds; None is what the line does not say.

    `branches` and `prefix_reset` describe what the hash ids show as well; a replay does not look at them.
    """

    hash_ids: array[int]
    output_tokens: int
    input_tokens: int | None = None
    timestamp_ms: float | None = None
    request_id: str | None = None
    session_id: str | None = None
    delay_ms: float | None = None
    priority: int | None = None
    strict_priority: int | None = None
    policy_class: str | None = None
    output_token_ids: array[int] | None = None
    wait_for: tuple[str, ...] = ()
    branches: tuple[str, ...] = ()
    tool_wait_ms: float | None = None
    prefix_reset: bool = False


def read_row(value: Any, *, agentic: bool = False) -> TraceRow:
    """The row a JSON value stands for. Raises InvalidArgument that says all that is wrong with it."""
    fields = Fields(value if isinstance(value, dict) else {})
    if not isinstance(value, dict):
        fields.problem(f"it is {shown(value)}, not an object")
        fields.check()
    hash_ids, output_tokens = _required(fields)
    row = TraceRow(
        hash_ids=hash_ids,
        output_tokens=output_tokens or 0,
        input_tokens=fields.whole("input_length", "input_tokens", low=1),
        timestamp_ms=fields.number("timestamp", "created_time"),
        request_id=fields.text("request_id"),
        session_id=fields.text("session_id"),
        delay_ms=fields.number("delay", "delay_ms"),
        priority=fields.whole("priority", low=-(2**31), high=2**31 - 1),
        strict_priority=fields.whole("strict_priority"),
        policy_class=fields.text("policy_class"),
        output_token_ids=_recorded(fields, output_tokens),
        wait_for=fields.texts("wait_for") if agentic else (),
        branches=fields.texts("branches") if agentic else (),
        tool_wait_ms=fields.number("tool_wait_ms") if agentic else None,
        prefix_reset=bool(fields.flag("prefix_reset")) if agentic else False,
    )
    _check_kind(fields, row, agentic)
    fields.check()
    return row


def _required(fields: Fields) -> tuple[array[int], int | None]:
    """What every row says: its hash ids and the length of its answer."""
    hash_ids = fields.ids("hash_ids")
    if fields.raw("hash_ids") is None:
        fields.problem("hash_ids is missing")
    elif hash_ids is not None and not hash_ids:
        fields.problem("hash_ids is empty")
    output_tokens = fields.whole("output_length", "output_tokens")
    if fields.values.get("output_length") is None and fields.values.get("output_tokens") is None:
        fields.problem("output_length is missing")
    return hash_ids or array("I"), output_tokens


def _recorded(fields: Fields, output_tokens: int | None) -> array[int] | None:
    """The recorded output, which has as many tokens as the line says and at least one."""
    tokens = fields.ids("output_token_ids")
    if tokens is None:
        return None
    if not tokens:
        fields.problem("output_token_ids is empty, a recorded output has at least one token")
    elif output_tokens is not None and output_tokens != len(tokens):
        fields.problem(f"output_length is {output_tokens}, there are {len(tokens)} output_token_ids")
    return tokens


def _check_kind(fields: Fields, row: TraceRow, agentic: bool) -> None:
    """What a row of one format must say and one of the other must not."""
    if not agentic:
        for name in AGENTIC_FIELDS:
            if fields.is_given(name):
                fields.problem(f"{name} is of the format agentic_mooncake")
        return
    if row.request_id is None:
        fields.problem("request_id is missing")
    elif row.request_id in row.wait_for:
        fields.problem("it waits for itself")
    if not row.wait_for and (row.delay_ms or row.tool_wait_ms):
        fields.problem("delay and tool_wait_ms are of rows that wait for others")
