"""What an error becomes for its client, decided without a loop."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeline.errors as errors
from pipeline import Annotated, PenstockError
from pipeline.errors import StatusError
from serving.problems import Problem, Refusal, error_of, explain, kind_of

SECRET = "/srv/secret.py: KeyError('password')"


def error_classes(root: type[PenstockError] = PenstockError) -> list[type[PenstockError]]:
    """The whole tree of `pipeline.errors`."""
    found = [root] if root.__module__ == errors.__name__ else []
    return found + [cls for child in root.__subclasses__() for cls in error_classes(child)]


FOREIGN = (ValueError, KeyError, OSError, RuntimeError, AssertionError, RecursionError, UnicodeError)


def shown(problem: Problem) -> str:
    """Everything of the problem that reaches a client."""
    return problem.body().decode() + problem.frame().decode()


links = st.sampled_from([*error_classes(), *FOREIGN])


@given(st.lists(links, min_size=1, max_size=4))
def test_nothing_internal_ever_reaches_a_client(chain: list[type[BaseException]]) -> None:
    """Whatever error comes, however it was caused: a 5xx or 499 shows none of its text, a 4xx only that of its rule."""
    error: BaseException | None = None
    for number, cls in enumerate(chain):
        link = cls(f"{SECRET} {number}")
        link.__cause__ = error
        error = link
    assert error is not None
    problem = explain(error)
    if not 400 <= problem.status < 499:
        assert "secret" not in shown(problem)
        assert "Error" not in problem.message
    else:
        assert any(issubclass(cls, (errors.InvalidArgument, errors.BackendInvalidArgument)) for cls in chain)
        assert problem.message.count("secret") == 1


@pytest.mark.parametrize("cls", error_classes(), ids=lambda cls: cls.__name__)
def test_every_error_has_the_status_of_its_facts(cls: type[PenstockError]) -> None:
    error = cls("text")
    assert explain(error).status == (500 if isinstance(error, StatusError) else error.facts.status)


@pytest.mark.parametrize(
    ("chain", "status", "kind"),
    [
        ([errors.ResourceExhausted, errors.InvalidArgument], 529, "overload"),
        ([errors.InvalidArgument, errors.ResourceExhausted], 529, "overload"),
        ([errors.Cancelled, errors.WorkerOverloaded], 529, "overload"),
        ([errors.InvalidArgument, errors.Unavailable], 503, "unavailable"),
        ([errors.Cancelled, errors.InvalidArgument], 400, "validation"),
        ([errors.Disconnected, errors.Cancelled], 499, "cancelled"),
        ([errors.StatusError, errors.Cancelled], 499, "cancelled"),
        ([RuntimeError, errors.BackendInvalidArgument], 400, "validation"),
        ([errors.Disconnected, RuntimeError], 500, "internal"),
        ([errors.ResponseTimeout], 500, "response_timeout"),
        ([errors.BackendCancelled], 500, "internal"),
    ],
)
def test_the_whole_chain_is_looked_at_in_order_of_precedence(chain: list[Any], status: int, kind: str) -> None:
    error: Any = None
    for cls in reversed(chain):
        link = cls("text")
        link.__cause__ = error
        error = link
    problem = explain(error)
    assert (problem.status, problem.kind) == (status, kind)


@pytest.mark.parametrize(
    ("own_status", "status", "message", "details"),
    [
        (400, 400, "own", None),
        (404, 404, "own", None),
        (498, 498, "own", None),
        (499, 499, "Request cancelled", None),
        (503, 503, "Internal server error", None),
        (529, 529, "Internal server error", None),
        (500, 500, "Internal server error", {"backend_status": 500}),
        (501, 500, "Internal server error", {"backend_status": 501}),
        (507, 500, "Internal server error", {"backend_status": 507}),
        (399, 500, "Internal server error", None),
        (0, 500, "Internal server error", None),
        (1000, 500, "Internal server error", None),
    ],
)
def test_an_asserted_status_is_believed_where_it_blames_the_client(
    own_status: int, status: int, message: str, details: Any
) -> None:
    problem = explain(StatusError("own", status=own_status))
    assert (problem.status, problem.message, problem.details) == (status, message, details)


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (400, "Validation: x", "validation"),
        (400, "x", "internal"),
        (404, "x", "not_found"),
        (429, "x", "overload"),
        (529, "x", "overload"),
        (503, "x", "unavailable"),
        (499, "x", "cancelled"),
        (501, "x", "not_implemented"),
        (413, "x", "validation"),
        (500, "x", "internal"),
        (302, "x", "internal"),
    ],
)
def test_a_status_alone_has_a_class(status: int, message: str, kind: str) -> None:
    assert kind_of(status, message) == kind
    assert Refusal(status, message).problem.kind == kind


def test_the_overload_code_is_looked_at_first() -> None:
    assert kind_of(503, "x", overload_status=503) == "overload"
    assert explain(errors.Unavailable("x"), overload_status=503).kind == "unavailable"


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (400, "Bad Request"),
        (413, "Payload Too Large"),
        (499, "Client Closed Request"),
        (529, "Overloaded"),
        (599, "Error"),
    ],
)
def test_the_type_of_an_error_is_its_status_in_words(status: int, reason: str) -> None:
    problem = Problem(status, "m", "internal")
    assert json.loads(problem.body()) == {"message": "m", "type": reason, "code": status}
    frame = json.loads(problem.frame().removeprefix(b"data: "))
    assert frame == {"error": {"message": "m", "type": reason.lower().replace(" ", "_"), "code": status}}


@pytest.mark.parametrize("cls", [errors.ResourceExhausted, errors.WorkerOverloaded])
@pytest.mark.parametrize("status", [429, 503, 529, 599])
def test_the_type_of_overload_is_the_same_under_every_status(cls: type[PenstockError], status: int) -> None:
    """A client distinguishes overload from an outage by the type."""
    problem = explain(cls("text"), overload_status=status)
    assert json.loads(problem.body())["type"] == "Overloaded"
    assert json.loads(problem.frame().removeprefix(b"data: "))["error"]["type"] == "overloaded"
    assert problem.status == status
    outage = explain(errors.Unavailable("text"), overload_status=status)
    assert json.loads(outage.body())["type"] == "Service Unavailable"


def test_details_come_along() -> None:
    assert json.loads(Problem(500, "m", "internal", {"k": 1}).body())["details"] == {"k": 1}


@given(
    st.text(st.characters(exclude_categories=()), max_size=50),
    st.integers(1, 5000),
    st.sampled_from([400, 404, 413, 431, 500]),
)
def test_no_error_body_is_longer_than_four_kilobytes(text: str, times: int, status: int) -> None:
    """Whatever text of a client's its message repeats, halves of surrogate pairs included."""
    message = text * times
    details, exceeded = {"backend_status": status}, errors.ExceededLimit("max_prompt_characters", 10**12, 10**12)
    problem = Problem(status, message, "internal", details, exceeded=exceeded)
    assert len(problem.body()) <= 4096
    assert len(problem.frame()) <= 4096
    if message.isascii() and len(message) * 6 <= 3000:
        assert problem.message == message


@pytest.mark.parametrize("comment", ["", "[]", "{}", '{"code": "x"}', "[" * 100_000, "nan"])
def test_a_comment_that_names_no_status_is_only_text(comment: str) -> None:
    error = error_of(Annotated[Any](None, None, "error", [comment], None))
    assert isinstance(error, errors.Unknown)


def test_an_item_that_is_no_error_has_none() -> None:
    assert error_of(Annotated[Any].from_annotation("note", 1)) is None
