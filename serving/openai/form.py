"""AnswerForm: what a client asked of the form of its answer; the same for whole answers and chunks."""

from __future__ import annotations

from attrs import frozen

from pipeline.protocols import BackendOutput, NvExtResponse
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest

from .logprobs import LogprobForm

_NO_FIELDS: frozenset[str] = frozenset()
"""Shared: an empty set takes 216 bytes, for as long as the answer lasts."""


@frozen
class AnswerForm:
    """The parts of a request its answer depends on. `created` is in seconds since the epoch.

    Choice k of prompt i has index `i * choices_per_prompt + k`.
    """

    id: str
    created: int
    model: str
    prompts: int = 1
    choices_per_prompt: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: LogprobForm | None = None
    extra_fields: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        request: ChatCompletionRequest | CompletionRequest,
        *,
        id: str,
        created: int,
        prompts: int = 1,
        force_usage: bool = False,
    ) -> AnswerForm:
        """The form the request asks for; `force_usage` adds usage to every stream."""
        options = request.stream_options
        asked = options is not None and bool(options.include_usage)
        return cls(
            id=id,
            created=created,
            model=request.model,
            prompts=prompts,
            choices_per_prompt=request.n or 1,
            include_usage=asked or force_usage,
            continuous_usage=options is not None and bool(options.continuous_usage_stats) and (asked or force_usage),
            logprobs=_logprobs(request),
            extra_fields=_NO_FIELDS if request.nvext is None else request.nvext.wanted_response_fields(),
        )

    @property
    def choices(self) -> int:
        """How many choices the whole answer has."""
        return self.prompts * self.choices_per_prompt

    def index(self, output: BackendOutput, prompt: int) -> int:
        """The index of the item's choice in the whole answer."""
        return prompt * self.choices_per_prompt + (output.index or 0)

    def nvext(self, output: BackendOutput) -> NvExtResponse | None:
        """The extension fields that were asked for and that the item has."""
        if not self.extra_fields:
            return None
        routing = output.routing_data
        known = NvExtResponse(
            worker_id=None if routing is None else routing.worker_id,
            timing=None if routing is None else routing.timing,
            token_ids=None if routing is None else routing.token_ids,
            router_decision=None if routing is None else routing.decision,
            engine_data=output.engine_data,
            stop_reason=output.stop_reason,
            completion_token_ids=output.token_ids or None,
        )
        return known.select(self.extra_fields, finished=output.finish_reason is not None, choices=self.choices)


def _logprobs(request: ChatCompletionRequest | CompletionRequest) -> LogprobForm | None:
    """The wanted log probabilities."""
    top = request.wanted_logprobs()
    return None if top is None else LogprobForm(top, bool(request.return_tokens_as_token_ids))
