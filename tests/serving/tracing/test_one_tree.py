"""The check that spans are one complete tree fails for trees that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeline import PenstockError
from tests.serving.tracing.worlds import Node, Recorded, Serving, one_tree
from tests.serving.worlds import chat

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda nodes: nodes[1:],
        lambda nodes: nodes[:-1],
        lambda nodes: [*nodes, nodes[0]],
        lambda nodes: [*nodes, Node("second root", TRACE, "9" * 16, "", 0, 1)],
        lambda nodes: [*nodes, Node("orphan", nodes[0].trace_id, "9" * 16, "8" * 16, 0, 1)],
        lambda nodes: [*nodes, Node("elsewhere", TRACE, "9" * 16, nodes[0].span_id, 0, 1)],
        lambda nodes: [*nodes, Node("late", nodes[0].trace_id, "9" * 16, nodes[0].span_id, 2**62, 2**63)],
        lambda nodes: [*nodes, Node("early", nodes[0].trace_id, "9" * 16, nodes[0].span_id, 0, 1)],
    ],
    ids=["missing leaf", "missing root", "doubled", "two roots", "orphan", "other trace", "late", "early"],
)
async def test_a_wrong_tree_is_noticed(spoil: Callable[..., Any], serving: Serving, recorded: Recorded) -> None:
    async with serving() as it:
        await chat(it.app).run()
    good = one_tree(recorded.nodes)
    spoiled = spoil(recorded.nodes)
    with pytest.raises(AssertionError):  # a leaf that is missing shows in the drawing only
        assert str(one_tree(spoiled)) == str(good)


async def test_a_span_that_has_not_ended_is_noticed(recorded: Recorded) -> None:
    other = Recorded()
    other.tracer.start_span("open")
    with pytest.raises(AssertionError, match="not ended"):
        other.tree()
    assert not issubclass(PenstockError, AssertionError)
