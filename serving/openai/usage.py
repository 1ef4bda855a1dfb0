"""UsageCount: the tokens of one answer, counted as they pass."""

from __future__ import annotations

from pipeline.protocols import BackendOutput, CompletionUsage, PromptTokensDetails


class UsageCount:
    """Counts the tokens of every prompt's stream; what a worker reports of its prompt is believed.

    Prompts sent together are summed.
    """

    __slots__ = ("_cached_tokens", "_prompt_tokens", "_reported", "completion_tokens")

    def __init__(self, prompts: int = 1) -> None:
        self.completion_tokens = 0
        self._prompt_tokens: list[int] = [0] * prompts
        self._cached_tokens: list[int | None] = [None] * prompts
        self._reported: CompletionUsage | None = None

    def add(self, output: BackendOutput, prompt: int) -> None:
        """Counts one item of the stream of that prompt."""
        self.completion_tokens += len(output.token_ids)
        if (usage := output.completion_usage) is not None:
            self._reported = usage
            self.prompt(prompt, usage.prompt_tokens, usage.prompt_tokens_details)

    def prompt(self, prompt: int, tokens: int, details: PromptTokensDetails | None = None) -> None:
        """That prompt has so many tokens; the last report holds."""
        self._prompt_tokens[prompt] = tokens
        if details is not None and details.cached_tokens is not None:
            self._cached_tokens[prompt] = details.cached_tokens

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompt_tokens)

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that workers had in their caches; None if no worker said."""
        known = [count for count in self._cached_tokens if count is not None]
        return sum(known) if known else None

    def total(self) -> CompletionUsage:
        """The counts up to now."""
        usage = CompletionUsage.of(self.prompt_tokens, self.completion_tokens)
        if (cached := self.cached_tokens) is not None:
            usage.prompt_tokens_details = PromptTokensDetails(cached)
        if self._reported is not None and len(self._prompt_tokens) == 1:
            usage.prompt_tokens_details = self._reported.prompt_tokens_details
            usage.completion_tokens_details = self._reported.completion_tokens_details
        return usage
