"""How long a stop string may be."""

from __future__ import annotations

from typing import Any

import pytest

from operators import validate
from pipeline import InvalidArgument
from pipeline.codec import from_plain
from pipeline.errors import ExceededLimit
from pipeline.protocols.limits import RequestLimits
from pipeline.protocols.openai import CompletionRequest

LIMITS = RequestLimits(max_stop_characters=4)


def text(stop: Any) -> CompletionRequest:
    return from_plain({"model": "m", "prompt": "hi", "stop": stop}, CompletionRequest)


@pytest.mark.parametrize(("stop", "field"), [("abcde", "stop"), (["a", "日本日本日"], "stop[1]")])
def test_a_stop_string_beyond_the_limit_is_refused_with_its_place(stop: Any, field: str) -> None:
    with pytest.raises(InvalidArgument, match="at most 4 characters, got 5") as caught:
        validate(text(stop), limits=LIMITS)
    assert caught.value.field == field
    assert caught.value.exceeded == ExceededLimit("max_stop_characters", 5, 4)


@pytest.mark.parametrize("stop", ["abcd", ["日本日本"] * 32, [123456], None])
def test_a_stop_string_up_to_the_limit_passes(stop: Any) -> None:
    validate(text(stop), limits=LIMITS)


def test_without_a_limit_any_length_passes() -> None:
    validate(text("x" * 1_000_000), limits=RequestLimits(max_stop_characters=0))
