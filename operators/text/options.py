"""The options of a chat or completion request, in the engine's own records. Pure.

Source: dynamo lib/llm/src/preprocessor.rs and lib/llm/src/protocols/openai.rs, the extract functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline import InvalidArgument
from pipeline.protocols import GuidedDecodingOptions, OutputOptions, RoutingHints, SamplingOptions, StopConditions
from pipeline.protocols.field_rules import InvalidRecord
from pipeline.protocols.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    NvExt,
    effective_cache_salt,
)

_FOR_THE_ENGINE = (
    *("logit_bias", "detokenize", "allowed_token_ids", "bad_words_token_ids", "logprob_token_ids"),
    *("prediction", "media_io_kwargs"),
)
"""Fields without a place in our records; an engine that knows them finds them in `extra_args`."""


def stop_conditions(request: GenerationRequest, eos_token_ids: Sequence[int]) -> StopConditions:
    """When to stop. The model's own ids are hidden stop ids; `ignore_eos` drops these and every other stop."""
    strings, ids = _stops(request)
    conditions = StopConditions(
        max_tokens=requested_max_tokens(request),
        stop=strings or None,
        stop_token_ids=list(dict.fromkeys([*ids, *(request.stop_token_ids or ())])) or None,
        stop_token_ids_hidden=list(dict.fromkeys(eos_token_ids)) or None,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        max_thinking_tokens=request.nvext.max_thinking_tokens if request.nvext else None,
    )
    conditions.apply_ignore_eos()
    return conditions


def _stops(request: GenerationRequest) -> tuple[list[str], list[int]]:
    """The stop strings and stop ids of the field `stop`, which holds either."""
    if request.stop is None:
        return [], []
    given = [request.stop] if isinstance(request.stop, str) else request.stop
    return [s for s in given if isinstance(s, str)], [s for s in given if isinstance(s, int)]


def requested_max_tokens(request: GenerationRequest) -> int | None:
    """The limit on the answer; a chat's newer field has precedence."""
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return request.max_tokens


def sampling_options(request: GenerationRequest) -> SamplingOptions:
    """How to draw. A `top_k` of 0 is no limit; greedy sampling drops temperature and top_p."""
    is_greedy = request.nvext is not None and bool(request.nvext.greed_sampling)
    return SamplingOptions(
        n=request.n,
        best_of=request.best_of if isinstance(request, CompletionRequest) else None,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        temperature=None if is_greedy else request.temperature,
        top_p=None if is_greedy else request.top_p,
        top_k=-1 if request.top_k == 0 else request.top_k,
        min_p=request.min_p,
        use_beam_search=request.use_beam_search,
        length_penalty=request.length_penalty,
        seed=request.seed,
        include_stop_str_in_output=request.include_stop_str_in_output,
        guided_decoding=_guided_decoding(request),
    )


def _guided_decoding(request: GenerationRequest) -> GuidedDecodingOptions | None:
    """The form the answer must have, by its own field or by the response format. Raises InvalidArgument for two."""
    json, structural_tag = request.guided_json, None
    form = request.response_format
    if form is not None and form.type in ("json_schema", "json_object"):
        if json is not None:
            raise InvalidArgument("guided_json and response_format exclude each other", field="guided_json")
        if form.type == "json_object":
            json = {"type": "object"}
        elif form.json_schema is not None:
            json = form.json_schema.schema
    if form is not None and form.type == "structural_tag":
        structural_tag = {"type": form.type, **form.extra}
    try:
        return GuidedDecodingOptions.from_optional(
            json=json,
            regex=request.guided_regex,
            choice=request.guided_choice,
            grammar=request.guided_grammar,
            backend=request.guided_decoding_backend,
            whitespace_pattern=request.guided_whitespace_pattern,
            structural_tag=structural_tag,
        )
    except InvalidRecord as error:
        place = f"guided_{error.field}" if error.field else "guided_decoding"
        raise InvalidArgument(f"{place}: {error.message}", field=place) from error


def output_options(request: GenerationRequest) -> OutputOptions:
    """What to return."""
    return OutputOptions(
        logprobs=request.wanted_logprobs(),
        prompt_logprobs=request.prompt_logprobs,
        skip_special_tokens=request.skip_special_tokens is not False,
        return_tokens_as_token_ids=request.return_tokens_as_token_ids,
    )


def routing_hints(request: GenerationRequest) -> RoutingHints | None:
    """Where the request should go and how urgent it is; None if it has no hints."""
    if request.nvext is None and not request.cache_salt:
        return None
    nvext = request.nvext or NvExt()
    agent = nvext.agent_hints
    hints = RoutingHints(
        backend_instance_id=nvext.backend_instance_id,
        prefill_worker_id=nvext.prefill_worker_id,
        decode_worker_id=nvext.decode_worker_id,
        dp_rank=nvext.dp_rank,
        prefill_dp_rank=nvext.prefill_dp_rank,
        expected_output_tokens=agent.osl if agent else None,
        cache_namespace=effective_cache_salt(request.nvext, request.cache_salt),
        priority_jump=agent.priority_jump() if agent else None,
        strict_priority=agent.strict_priority if agent else None,
        priority=agent.priority if agent else None,
        routing_constraints=nvext.routing_constraints,
    )
    return None if hints == RoutingHints() else hints


def extra_args(request: GenerationRequest) -> dict[str, Any] | None:
    """Fields that only the engine understands, under their own names; None if there are none."""
    given = {name: value for name in _FOR_THE_ENGINE if (value := getattr(request, name, None)) is not None}
    return given or None
