"""Offers: which of several owners has a name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from attrs import frozen

from pipeline import AsyncEngine
from pipeline.testing import ScriptedEngine
from serving.deployment.model_graph import Offers


@frozen(eq=False)
class Owned:
    name: str

    @property
    def names(self) -> Collection[str]:
        return [self.name]


def graphs(*names: str) -> dict[str, Any]:
    return {name: (ScriptedEngine([]), ScriptedEngine([])) for name in names}


def offered(offers: Offers) -> dict[str, AsyncEngine[Any, Any]]:
    assert offers.switch.graphs.keys() == offers.tokens.graphs.keys()
    return dict(offers.switch.graphs)


def test_an_adapter_stays_with_the_model_that_had_it_first(caplog: pytest.LogCaptureFixture) -> None:
    offers, one, other = Offers(), graphs("a", "x"), graphs("b", "x")
    offers.offer(Owned("a"), one)
    for _ in range(3):
        offers.offer(Owned("b"), other)
    assert offered(offers) == {"a": one["a"][0], "x": one["x"][0], "b": other["b"][0]}
    assert caplog.text.count("b is not served as 'x' too") == 1


def test_a_model_takes_its_name_from_an_adapter() -> None:
    offers, one, other = Offers(), graphs("a", "b"), graphs("b")
    offers.offer(Owned("a"), one)
    offers.offer(Owned("b"), other)
    assert offered(offers) == {"a": one["a"][0], "b": other["b"][0]}
    offers.offer(Owned("c"), third := graphs("c", "b"))
    assert offered(offers) == {"a": one["a"][0], "b": other["b"][0], "c": third["c"][0]}


def test_names_that_an_owner_no_longer_offers_are_free() -> None:
    offers, owner, one = Offers(), Owned("a"), graphs("a", "x")
    offers.offer(owner, one)
    offers.offer(owner, {"a": one["a"]})
    assert offered(offers) == {"a": one["a"][0]}
    offers.offer(Owned("b"), other := graphs("x"))
    assert offered(offers)["x"] is other["x"][0]
