"""Errors cross a process as what they are."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.kv.errors import QueueRejected
from pipeline import Annotated
from pipeline.errors import (
    BackendError,
    BackendUnknown,
    CannotConnect,
    ContractViolation,
    Disconnected,
    EngineShutdown,
    ExceededLimit,
    InvalidArgument,
    MessageTooLarge,
    PenstockError,
    ResourceExhausted,
    StatusError,
    StreamIncomplete,
    Unavailable,
    Unknown,
    WorkerOverloaded,
    chain,
)
from pipeline.protocols.field_rules import InvalidRecord
from pipeline.wire import from_json, to_json
from pipeline.wire.errors import LINKS_MAX, error_from_plain, error_to_plain

OURS = [cls for cls in PenstockError._by_name.values() if cls.__module__ == "pipeline.errors"]


@pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.__name__)
def test_every_class_comes_back_as_itself(cls: type[PenstockError]) -> None:
    again = error_from_plain(error_to_plain(cls("text")))
    expected = BackendUnknown if cls is BackendError else cls
    assert (type(again), again.message) == (expected, "text")
    assert again.__cause__ is None


def test_plain_types_are_texts_and_backend_types_objects() -> None:
    assert error_to_plain(Disconnected("x")) == {"error_type": "Disconnected", "message": "x"}
    assert error_to_plain(EngineShutdown("x")) == {"error_type": {"Backend": "EngineShutdown"}, "message": "x"}


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (InvalidArgument("m", field="a[1].b"), {"field": "a[1].b"}),
        (StatusError("m", status=418), {"status": 418}),
        (MessageTooLarge("m", size_bytes=9, limit_bytes=8), {"size_bytes": 9, "limit_bytes": 8}),
        (ContractViolation("m", rule="E3"), {"rule": "E3"}),
    ],
)
def test_facts_of_a_class_travel(error: PenstockError, facts: dict[str, Any]) -> None:
    again = error_from_plain(error_to_plain(error))
    assert type(again) is type(error)
    assert {name: getattr(again, name) for name in facts} == facts


class FullFor(ResourceExhausted):
    """A refusal with facts of its own."""

    def __init__(
        self,
        message: str = "",
        *,
        retry_after_s: float | None = None,
        status: int = 529,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message, cause=cause)
        self.retry_after_s, self.status = retry_after_s, status


class GoneFor(Unavailable):
    """A refusal with one of them."""

    def __init__(
        self, message: str = "", *, retry_after_s: float | None = None, cause: BaseException | None = None
    ) -> None:
        super().__init__(message, cause=cause)
        self.retry_after_s = retry_after_s


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (FullFor("m", retry_after_s=2.5, status=503), {"retry_after_s": 2.5, "status": 503}),
        (FullFor("m", retry_after_s=0), {"retry_after_s": 0, "status": 529}),
        (FullFor("m"), {"retry_after_s": None, "status": 529}),
        (GoneFor("m", retry_after_s=0.25), {"retry_after_s": 0.25}),
        (GoneFor("m"), {"retry_after_s": None}),
    ],
)
def test_the_time_to_retry_travels_with_every_refusal_that_has_one(error: PenstockError, facts: dict[str, Any]) -> None:
    item = from_json(to_json(Annotated[Any].from_error(error)), Annotated[Any])
    assert type(item.error) is type(error)
    assert {name: getattr(item.error, name) for name in facts} == facts


@pytest.mark.parametrize("cls", [ResourceExhausted, Unavailable])
def test_details_a_class_does_not_take_leave_it_what_it_is(cls: type[PenstockError]) -> None:
    record = {"error_type": cls.__name__, "message": "m", "details": {"retry_after_s": 1.0, "status": 503}}
    again = error_from_plain(record)
    assert (type(again), again.message) == (cls, "m")
    assert "details" not in error_to_plain(again)


@given(st.lists(st.sampled_from([Disconnected, CannotConnect, StreamIncomplete, Unknown]), min_size=1, max_size=5))
def test_the_whole_chain_travels(classes: list[type[PenstockError]]) -> None:
    error: PenstockError | None = None
    for number, cls in enumerate(classes):
        error = cls(f"link {number}", cause=error)
    assert error is not None
    again = error_from_plain(error_to_plain(error))
    assert [(type(link), str(link)) for link in chain(again)] == [(type(link), str(link)) for link in chain(error)]


def test_a_foreign_exception_becomes_unknown_with_its_causes() -> None:
    error = OSError("socket")
    error.__cause__ = Disconnected("peer")
    again = error_from_plain(error_to_plain(error))
    assert [(type(link), str(link)) for link in chain(again)] == [(Unknown, "socket"), (Disconnected, "peer")]


def test_a_foreign_cause_inside_a_chain_becomes_unknown() -> None:
    again = error_from_plain(error_to_plain(CannotConnect("c", cause=ValueError("deep"))))
    assert [(type(link), str(link)) for link in chain(again)] == [(CannotConnect, "c"), (Unknown, "deep")]


def test_a_cycle_of_causes_ends() -> None:
    first, second = Disconnected("1"), CannotConnect("2")
    first.__cause__, second.__cause__ = second, first
    assert [str(link) for link in chain(error_from_plain(error_to_plain(first)))] == ["1", "2"]


def test_of_a_very_long_chain_the_outermost_links_travel() -> None:
    error: PenstockError | None = None
    for number in range(5_000):
        error = Disconnected(str(number), cause=error)
    item = from_json(to_json(Annotated[Any].from_error(error or Unknown())), Annotated[Any])
    assert item.error is not None
    assert [str(link) for link in chain(item.error)] == [str(4_999 - depth) for depth in range(LINKS_MAX)]


@pytest.mark.parametrize(
    ("kind", "cls"),
    [("Newer", Unknown), ({"Backend": "Newer"}, BackendUnknown), ({"Backend": "EngineShutdown"}, EngineShutdown)],
)
def test_a_type_this_process_does_not_know_is_unknown(kind: Any, cls: type[PenstockError]) -> None:
    assert type(error_from_plain({"error_type": kind, "message": "m"})) is cls


def test_a_class_that_cannot_be_made_from_a_record_is_unknown() -> None:
    class NeedsMore(PenstockError):
        def __init__(self, message: str, worker: int, **kwargs: Any) -> None:
            super().__init__(message, **kwargs)
            self.worker = worker

    again = error_from_plain(error_to_plain(NeedsMore("m", 3)))
    assert (type(again), again.message) == (Unknown, "m")


@pytest.mark.parametrize(
    "record",
    [
        None,
        "text",
        {"message": "m"},
        {"error_type": 1, "message": "m"},
        {"error_type": {"Other": "x"}, "message": "m"},
        {"error_type": "Unknown", "message": 1},
        {"error_type": "Unknown", "message": "m", "caused_by": "x"},
    ],
)
def test_what_is_no_error_record_is_refused(record: Any) -> None:
    with pytest.raises(InvalidRecord):
        error_from_plain(record)


@pytest.mark.parametrize(
    ("link", "place"),
    [({"error_type": "Unknown", "message": 1}, "message"), ({"message": "m"}, "error_type"), ("text", "")],
)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_is_wrong_with_a_cause_is_named_by_its_path(link: Any, place: str, depth: int) -> None:
    record = link
    for _ in range(depth):
        record = {"error_type": "Unknown", "message": "m", "caused_by": record}
    with pytest.raises(InvalidRecord) as refused:
        error_from_plain(record)
    assert refused.value.field == ".".join([*["caused_by"] * depth, *filter(None, [place])])


def test_details_of_the_wrong_kind_are_left_out() -> None:
    error = error_from_plain({"error_type": "StatusError", "message": "m", "details": {"status": "418"}})
    assert isinstance(error, StatusError)
    assert error.status == 500
    details = {"retry_after_s": True, "status": 503.0}
    refused = error_from_plain({"error_type": "FullFor", "message": "m", "details": details})
    assert isinstance(refused, FullFor)
    assert (refused.retry_after_s, refused.status) == (None, 529)


@pytest.mark.parametrize("cls", [InvalidArgument, ResourceExhausted, WorkerOverloaded, Unavailable, QueueRejected])
def test_the_limit_that_refused_travels(cls: type[Any]) -> None:
    exceeded = ExceededLimit("max_tools", 2000, 1536.5)
    plain = json.loads(json.dumps(error_to_plain(cls("m", exceeded=exceeded))))
    assert error_from_plain(plain).exceeded == exceeded


@pytest.mark.parametrize(
    "exceeded",
    [
        None,
        "max_tools",
        {"name": "max_tools", "value": 1},
        {"name": "max_tools", "value": True, "threshold": 1},
        {"name": "max_tools", "value": math.nan, "threshold": 1},
        {"name": "max_tools", "value": 10**400, "threshold": 1},
        {"name": "a\r\nset-cookie: b", "value": 2, "threshold": 1},
        {"name": "a" * 65, "value": 2, "threshold": 1},
        {"name": "", "value": 2, "threshold": 1},
    ],
)
def test_a_limit_that_no_header_could_show_is_left_out(exceeded: Any) -> None:
    error = error_from_plain({"error_type": "InvalidArgument", "message": "m", "details": {"exceeded": exceeded}})
    assert (type(error), error.message, error.exceeded) == (InvalidArgument, "m", None)
