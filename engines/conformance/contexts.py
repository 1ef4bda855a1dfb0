"""The context of a request to an engine under check."""

from __future__ import annotations

from pipeline import Context

from ..llm import GenerateContext


class MockContext(GenerateContext):
    """Refuses tokens that are offered, and notes that there were some."""

    __slots__ = ("was_offered",)

    def __init__(self, id: str | None = None) -> None:
        super().__init__(Context(None, id=id))
        self.was_offered = False

    def offer_token(self, token_id: int) -> bool:
        self.was_offered = True
        return False


def mock_context(id: str | None = None) -> MockContext:
    """Return a context as an engine receives it, of a request that is not stopped."""
    return MockContext(id)
