"""One item of a stream: data, event, comments, error."""

from __future__ import annotations

import json

import pytest

from pipeline import Annotated, Disconnected, PenstockError, Unknown


def test_an_item_from_an_error_text_is_an_error_and_a_data_item_is_not() -> None:
    assert Annotated.from_data(1).is_ok
    item: Annotated[int] = Annotated.from_error("boom")
    assert item.is_error
    assert not item.is_ok
    assert isinstance(item.error, Unknown)


def test_a_typed_error_keeps_its_type_and_text() -> None:
    error = Disconnected("connection lost")
    item: Annotated[int] = Annotated.from_error(error)
    assert item.extract_error() is error
    assert item.event == "error"


def test_a_foreign_error_is_converted_with_its_causes() -> None:
    outer = ValueError("outer")
    outer.__cause__ = OSError("disk")
    item: Annotated[int] = Annotated.from_error(outer)
    error = item.extract_error()
    assert isinstance(error, Unknown)
    assert str(error) == "outer"
    assert str(error.__cause__) == "disk"


def test_an_error_is_kept_when_an_item_is_transferred_without_data() -> None:
    item: Annotated[int] = Annotated.from_error("boom")
    moved: Annotated[str] = item.transfer(None)
    assert moved.is_error
    assert moved.error is item.error


@pytest.mark.parametrize("name", ["ok", "into_data", "into_result"])
def test_taking_the_data_of_an_error_item_raises_its_error(name: str) -> None:
    with pytest.raises(PenstockError, match="boom"):
        getattr(Annotated.from_error("boom"), name)()


def test_asking_a_good_item_gives_it_back() -> None:
    item = Annotated.from_data(3)
    assert item.ok() is item
    assert item.into_data() == 3
    assert Annotated[int](event="note").into_data() is None


def test_map_data_keeps_everything_but_the_data() -> None:
    item = Annotated(2, id="1", event="note", comment=["c"]).map_data(str)
    assert item == Annotated("2", id="1", event="note", comment=["c"])


def test_a_failing_map_gives_a_fresh_error_item_with_the_failure_text() -> None:

    def fail(_: int) -> int:
        raise ValueError("cannot")

    item = Annotated(2, id="1", comment=["c"]).map_data(fail)
    assert item.is_error
    assert str(item.extract_error()) == "cannot"
    assert (item.id, item.comment) == (None, None)


@pytest.mark.parametrize(("comment", "text"), [(["a", "b"], "a, b"), ([], "unknown error"), (None, "unknown error")])
def test_an_error_event_without_an_error_has_its_comments_as_text(comment: list[str] | None, text: str) -> None:
    item: Annotated[int] = Annotated(event="error", comment=comment)
    error = item.extract_error()
    assert isinstance(error, Unknown)
    assert str(error) == text


def test_an_error_field_without_the_event_is_not_an_error_item() -> None:
    item = Annotated[int](error=Unknown("x"))
    assert item.is_ok
    assert item.extract_error() is None


def test_an_annotation_is_an_event_with_json_in_its_one_comment() -> None:
    item: Annotated[int] = Annotated.from_annotation("formatted_prompt", {"a": ["é"]})
    assert item.is_event
    assert item.event == "formatted_prompt"
    assert item.data is None
    assert [json.loads(c) for c in item.comment or []] == [{"a": ["é"]}]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_an_annotation_without_a_json_form_is_refused(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        Annotated[int].from_annotation("name", value)
