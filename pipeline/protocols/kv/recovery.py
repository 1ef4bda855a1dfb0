"""KV recovery: the request of a router to a worker whose events it missed, and the answers.

    RecoveryRequest ──► endpoint of the worker's rank ──► RecoveryReply, which holds one of the answers

Source: dynamo lib/kv-router/src/indexer/types.rs, WorkerKvQueryRequest and WorkerKvQueryResponse. Other than there, the
request names no worker, which the instance does, a failed worker ends its stream with an error, and a reply names the
publisher of the events it covers.
"""

from __future__ import annotations

from typing import Any, Self, TypeAlias

from attrs import frozen

from ..field_rules import U32, U64, InvalidRecord, skip
from .events import RouterEvent

ENDPOINT_PREFIX = "worker_kv_indexer_query_dp"


def recovery_endpoint(dp_rank: int) -> str:
    """Return the name of the endpoint, in the worker's component, at which its rank answers; one for each rank."""
    return f"{ENDPOINT_PREFIX}{dp_rank}"


@frozen
class RecoveryRequest:
    """The rank's events from the start on, both ends included; without a start everything it holds.

    The end is checked, and bounds nothing: an answer goes to the newest event.
    """

    dp_rank: U32 = 0
    start_event_id: U64 | None = None
    end_event_id: U64 | None = None


@frozen
class RecoveredEvents:
    """All events from the requested one to the newest; or from the last clear on, which makes those before it void."""

    events: list[RouterEvent]


@frozen
class RecoveredTree:
    """Everything the rank holds after event `last_event_id`, to be installed in place of what is known of it.

    Stores that build the tree, then maybe some later events as they came; the ids of the stores mean nothing.
    """

    events: list[RouterEvent]
    last_event_id: U64


@frozen
class InvalidRange:
    """The requested end lies before the start."""

    start_id: U64
    end_id: U64


@frozen
class TooNew:
    """The start lies after the newest event: this is another worker, or it has restarted."""

    requested_start: U64
    requested_end: U64 | None
    newest_available: U64


@frozen
class DumpFailed:
    """The state of the rank could not be read; a second request may succeed."""

    message: str


RecoveryAnswer: TypeAlias = RecoveredEvents | RecoveredTree | InvalidRange | TooNew | DumpFailed


@frozen
class RecoveryReply:
    """An answer as a message: an object with one key, the kind of answer. Raises InvalidRecord for any other object.

    `publisher_id`, beside that key, is the id under which the worker that answers publishes its events on the event
    plane. It identifies the life of the worker: a worker that starts again, under the same worker id, publishes under
    another. None, and omitted, if the worker does not know it.
    """

    events: RecoveredEvents | None = skip(name="Events")
    tree: RecoveredTree | None = skip(name="TreeDump")
    too_new: TooNew | None = skip(name="TooNew")
    invalid_range: InvalidRange | None = skip(name="InvalidRange")
    dump_failed: DumpFailed | None = skip(name="TreeDumpFailed")
    publisher_id: U64 | None = skip()

    def __attrs_post_init__(self) -> None:
        if len(self._answers()) != 1:
            raise InvalidRecord("expected exactly one answer")

    @classmethod
    def of(cls, answer: RecoveryAnswer, publisher_id: int | None = None) -> Self:
        """Return the reply that holds the answer."""
        fields: dict[str, Any] = {_FIELDS[type(answer)]: answer}
        return cls(**fields, publisher_id=publisher_id)

    @property
    def answer(self) -> RecoveryAnswer:
        (answer,) = self._answers()
        return answer

    def _answers(self) -> list[RecoveryAnswer]:
        return [answer for name in _FIELDS.values() if (answer := getattr(self, name)) is not None]


_FIELDS: dict[type[RecoveryAnswer], str] = {
    RecoveredEvents: "events",
    RecoveredTree: "tree",
    TooNew: "too_new",
    InvalidRange: "invalid_range",
    DumpFailed: "dump_failed",
}
"""The field of a reply for each kind of answer."""
