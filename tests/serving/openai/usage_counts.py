"""The usage of an answer whose tokens are counted by the test."""

from __future__ import annotations

from attrs import define

from serving.openai import UsageCount


@define
class Counted:
    """The tokens of an answer."""

    output_tokens: int = 0


def usage_count(prompts: int = 1, *, tokens: int = 0) -> UsageCount:
    """Return the usage of an answer with so many tokens."""
    return UsageCount(Counted(tokens), prompts)
