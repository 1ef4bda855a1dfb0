"""What a chat or completion request may hold: one table of fields and rules.

The codec has checked the kinds of values before; here are ranges and combinations. The first broken rule, in the
order of the table, is reported as InvalidArgument "Validation: ...", with the path of the place as its field.

Source: dynamo lib/llm/src/protocols/openai/validate.rs. Other than there, nothing limits stop strings a second time.
"""

from __future__ import annotations

from attrs import frozen

from pipeline import InvalidArgument
from pipeline.protocols.limits import RequestLimits
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest, GenerationRequest

from . import request_checks as check
from .request_checks import Check
from .request_size import check_size

TOKENS_MAX = 1_048_576
DEFAULT_LIMITS = RequestLimits()


@frozen
class Rule:
    """One row: a field, the check of its value, and the kind of request it is for. Only `prompt` is checked unset."""

    field: str
    check: Check
    kind: type[GenerationRequest] = GenerationRequest
    is_required: bool = False


RULES = (
    Rule("unsupported", check.known_only),
    Rule("chat_template_args", check.own_template_args, ChatCompletionRequest),
    Rule("messages", check.messages, ChatCompletionRequest),
    Rule("messages", check.tool_call_arguments, ChatCompletionRequest),
    Rule("prompt", check.prompt, CompletionRequest, is_required=True),
    Rule("prompt_embeds", check.prompt_embeds),
    Rule("model", check.not_blank("Model")),
    Rule("user", check.not_blank("User ID")),
    Rule("frequency_penalty", check.between("Frequency penalty", -2, 2)),
    Rule("presence_penalty", check.between("Presence penalty", -2, 2)),
    Rule("repetition_penalty", check.between("Repetition penalty", 0, 2, above_low=True)),
    Rule("temperature", check.between("Temperature", 0, 2)),
    Rule("top_p", check.between("Top_p", 0, 1, above_low=True)),
    Rule("min_p", check.between("Min_p", 0, 1)),
    Rule("top_k", check.at_least("Top_k", -1)),
    Rule("logit_bias", check.logit_bias),
    Rule("top_logprobs", check.between("Top_logprobs", 0, 20), ChatCompletionRequest),
    Rule("top_logprobs", check.top_logprobs, ChatCompletionRequest),
    Rule("logprobs", check.between("Logprobs", 0, 5), CompletionRequest),
    Rule("n", check.choices),
    Rule("best_of", check.between("Best_of", 0, 20), CompletionRequest),
    Rule("best_of", check.best_of, CompletionRequest),
    Rule("max_tokens", check.between("Max_tokens", 1, TOKENS_MAX)),
    Rule("max_completion_tokens", check.between("Max_completion_tokens", 1, TOKENS_MAX), ChatCompletionRequest),
    Rule("stop", check.stop),
    Rule("stop_token_ids", check.stop_token_ids),
    Rule("tools", check.tools, ChatCompletionRequest),
    Rule("tool_choice", check.tool_choice, ChatCompletionRequest),
    Rule("response_format", check.response_format),
    Rule("stream_options", check.stream_options),
    Rule("modalities", check.text_only, ChatCompletionRequest),
    Rule("audio", check.not_supported("audio"), ChatCompletionRequest),
    Rule("store", check.not_supported("store"), ChatCompletionRequest),
    Rule("web_search_options", check.not_supported("web_search_options"), ChatCompletionRequest),
    Rule("service_tier", check.service_tier, ChatCompletionRequest),
    Rule("echo", check.not_supported("echo"), CompletionRequest),
    Rule("suffix", check.not_supported("suffix"), CompletionRequest),
    Rule("nvext", check.nvext),
)


def keywords_of(kind: type[GenerationRequest]) -> dict[str, dict[str, object]]:
    """For each field of this kind of request that has rules: the keywords of JSON Schema that stand for them.

    What depends on more than one field is not among them.
    """
    found: dict[str, dict[str, object]] = {}
    for rule in RULES:
        if issubclass(kind, rule.kind) and rule.check in check.KEYWORDS:
            found.setdefault(rule.field, {}).update(check.KEYWORDS[rule.check])
    return found


def validate(
    request: GenerationRequest, *, ignore_unsupported: bool = False, limits: RequestLimits = DEFAULT_LIMITS
) -> None:
    """Raise InvalidArgument if the request is beyond a limit, then for the first rule it breaks.

    Fields unknown here may be ignored instead.
    """
    check_size(request, limits)
    for rule in RULES:
        if not isinstance(request, rule.kind) or (ignore_unsupported and rule.field == "unsupported"):
            continue
        value = getattr(request, rule.field)
        if value is None and not rule.is_required:
            continue
        for place, problem in rule.check(value, request):
            joint = "." if place and not place.startswith("[") else ""
            raise InvalidArgument(f"Validation: {problem}", field=f"{rule.field}{joint}{place}")
