"""Mark: a value for the stage below, for one dispatch."""

from __future__ import annotations

from operators.marks import Mark
from pipeline import Context


def test_a_mark_is_taken_once_and_leaves_nothing_in_the_registry() -> None:
    mark, request = Mark[int]("m"), Context("payload")
    assert mark.take(request) is None
    mark.put(request, 1)
    assert mark.take(request.with_payload("other")) == 1
    assert mark.take(request) is None
    assert request.registry.get_optional("m", dict) is None
    mark.put(request, 2)
    assert mark.take(request) == 2


def test_the_marks_of_a_request_and_its_child_are_two() -> None:
    mark, request = Mark[int]("m"), Context("payload")
    child = request.child("prefill")
    mark.put(request, 1)
    mark.put(child, 2)
    assert mark.take(child) == 2
    assert mark.take(child) is None
    assert mark.take(request) == 1
