"""The error tree and its one table of facts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import errors
from pipeline.errors import (
    FACTS,
    BackendError,
    BackendInvalidArgument,
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    EngineShutdown,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    ResponseTimeout,
    StreamIncomplete,
    Unavailable,
    Unknown,
    WorkerOverloaded,
    blames_worker,
    chain,
    match_chain,
    may_migrate,
    to_error,
    ungrouped,
)


def all_errors(cls: type[PenstockError] = PenstockError) -> list[type[PenstockError]]:
    """The project's own tree, without what tests derive from it."""
    own = [sub for sub in cls.__subclasses__() if sub.__module__ == errors.__name__]
    return [cls, *(sub for direct in own for sub in all_errors(direct))]


def test_a_text_becomes_an_unknown_error_without_a_cause() -> None:
    error = to_error(Exception("text"))
    assert isinstance(error, Unknown)
    assert str(error) == "text"
    assert error.__cause__ is None


def test_a_foreign_error_is_converted_and_its_cause_stays_reachable() -> None:
    foreign = ValueError("outer")
    foreign.__cause__ = KeyError("inner")
    error = to_error(foreign)
    assert [type(link) for link in chain(error)] == [Unknown, Unknown]
    assert "inner" in str(error.__cause__)


def test_a_typed_error_inside_a_foreign_chain_keeps_its_type() -> None:
    typed = Disconnected("gone")
    foreign = RuntimeError("wrapped")
    foreign.__cause__ = typed
    assert to_error(foreign).__cause__ is typed


@pytest.mark.parametrize("cls", [c for c in all_errors() if not issubclass(c, BackendError)])
def test_a_plain_error_is_shown_under_its_name(cls: type[PenstockError]) -> None:
    assert cls("text").render() == f"{cls.__name__}: text"


@pytest.mark.parametrize("kind", [c.kind for c in BackendError.__subclasses__()])
def test_a_backend_error_is_shown_as_backend_and_kind_in_one_word(kind: str) -> None:
    cls = next(c for c in BackendError.__subclasses__() if c.kind == kind)
    assert cls("text").render() == f"Backend{kind}: text"


def test_rendering_shows_the_outermost_link_only() -> None:
    assert Disconnected("a", cause=Unknown("b")).render() == "Disconnected: a"


def test_a_typed_error_is_not_wrapped_again() -> None:
    error = CannotConnect("no")
    assert to_error(error) is error
    assert to_error(ExceptionGroup("of one", [ExceptionGroup("again", [error])])) is error


def test_a_group_of_several_is_one_unknown() -> None:
    assert isinstance(to_error(ExceptionGroup("two", [CannotConnect("a"), Unknown("b")])), Unknown)


@given(st.integers(0, 4), st.lists(st.sampled_from([CannotConnect, Unknown, ValueError]), min_size=1, max_size=4))
def test_a_group_stands_for_its_only_error_or_the_first_of_several_alike(depth: int, classes: list[Any]) -> None:
    errors: list[Exception] = [cls(str(at)) for at, cls in enumerate(classes)]
    group = ExceptionGroup("of all", errors)
    for _ in range(depth):
        group = ExceptionGroup("again", [group])
    is_one = len(errors) == 1 or (len(set(classes)) == 1 and classes[0] is not ValueError)
    assert ungrouped(group) is (errors[0] if is_one else group)
    assert ungrouped(errors[0]) is errors[0]


def test_every_error_has_facts_and_every_type_name_is_unique() -> None:
    classes = all_errors()
    assert all(cls("x").facts in FACTS.values() for cls in classes)
    names = [cls.type_name for cls in classes]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("error", "migrates"),
    [
        (CannotConnect(), True),
        (Disconnected(), True),
        (ConnectionTimeout(), True),
        (ResponseTimeout(), True),
        (EngineShutdown(), True),
        (StreamIncomplete(), True),
        (WorkerOverloaded(), True),
        (Unknown(), False),
        (InvalidArgument(), False),
        (Cancelled(), False),
        (ResourceExhausted(), False),
        (Unavailable(), False),
        (BackendInvalidArgument(), False),
    ],
)
def test_which_errors_may_migrate(error: PenstockError, migrates: bool) -> None:
    assert may_migrate(error) is migrates


@pytest.mark.parametrize("excluding", [Cancelled(), ResourceExhausted()])
def test_an_excluding_error_anywhere_in_the_chain_forbids_migration(excluding: PenstockError) -> None:
    assert not may_migrate(Disconnected("outer", cause=excluding))
    excluding.__cause__ = Disconnected("inner")
    assert not may_migrate(excluding)


def test_a_wanted_cause_behind_a_neutral_error_allows_migration() -> None:
    assert may_migrate(Unknown("outer", cause=Disconnected("inner")))


def test_match_chain_wants_one_link_and_excludes_by_any() -> None:
    error = Unknown("a", cause=Disconnected("b", cause=Cancelled("c")))
    assert match_chain(error, [Disconnected])
    assert not match_chain(error, [Disconnected], [Cancelled])
    assert not match_chain(error, [CannotConnect])


def test_a_cycle_of_causes_ends() -> None:
    a, b = Unknown("a"), Unknown("b")
    a.__cause__, b.__cause__ = b, a
    assert list(chain(a)) == [a, b]
    assert not may_migrate(a)


@pytest.mark.parametrize(
    ("error", "blamed"),
    [(Disconnected(), True), (StreamIncomplete(), True), (Cancelled(), False), (WorkerOverloaded(), False)],
)
def test_which_errors_blame_the_worker(error: PenstockError, blamed: bool) -> None:
    assert blames_worker(error) is blamed


def test_only_errors_meant_for_the_client_are_shown() -> None:
    shown = {cls for cls in all_errors() if cls("x").facts.shown}
    assert shown == {InvalidArgument, BackendInvalidArgument}
    assert all(cls("x").facts.status == 400 for cls in shown)


def test_the_drawn_tree_names_every_error() -> None:
    missing = [
        cls.__name__
        for cls in all_errors()
        if cls.__name__ not in (errors.__doc__ or "") and not issubclass(cls, BackendError)
    ]
    assert missing == []


def test_an_error_of_ones_own_is_found_by_name_but_may_not_take_a_name_of_ours() -> None:
    class Drought(PenstockError):
        pass

    assert errors.error_type("Drought") is Drought
    assert errors.error_type("Disconnected") is Disconnected
    assert errors.error_type("Nothing") is None
    with pytest.raises(TypeError, match="Unavailable"):
        type("Unavailable", (PenstockError,), {})
    assert errors.error_type("Unavailable") is Unavailable
