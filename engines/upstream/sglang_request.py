"""Requests in tokens as SGLang gets them by `POST /generate`.

Source: sglang/srt/managers/io_struct.py, GenerateReqInput, and sglang/srt/sampling/sampling_params.py, SamplingParams.
An option that SGLang does not have is refused.
"""

from __future__ import annotations

import re
from typing import Any

from attrs import frozen

from pipeline.protocols import GuidedDecodingOptions, PreprocessedRequest
from pipeline.wire import plain_to_json

from ..roles import DisaggregationMode, own_dp_rank
from .connectors import BootstrapFields
from .facts import ServerFacts
from .request_rules import check, given, stop_ids

_ABSENT = "an SGLang server does not have it beside a stream of tokens"
_RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
_STOP = ("min_tokens", "ignore_eos", "stop")
_SAMPLING = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p", "seed"),
)


@frozen(kw_only=True)
class SglangServer:
    """What the requests to one server depend on."""

    mode: DisaggregationMode = DisaggregationMode.AGGREGATED
    """Which part of a request it serves."""
    has_tokenizer: bool = True
    """Whether it can find stop strings."""
    priority_sign: int = 0
    """1: the request with the higher priority is first; -1: that with the lower one; 0: it has no priorities."""
    is_incremental: bool | None = None
    """Whether each chunk has only the tokens that are new in it; None: it is not known."""

    @property
    def is_half(self) -> bool:
        """Whether another server has the other part of each request."""
        return self.mode in (DisaggregationMode.PREFILL, DisaggregationMode.DECODE)


def generate_body(
    request: PreprocessedRequest, facts: ServerFacts, server: SglangServer, request_id: str, session: str | None
) -> dict[str, Any]:
    """Return the body of `/generate`. Raise InvalidArgument for a request that the server cannot answer."""
    check(request, _ABSENT, _absent(request))
    body: dict[str, Any] = {
        "rid": request_id,
        "input_ids": request.token_ids,
        "sampling_params": _sampling(request, server),
        "stream": True,
    }
    if (candidates := request.output_options.logprobs) is not None and server.mode is not DisaggregationMode.PREFILL:
        body |= {"return_logprob": True, "top_logprobs_num": candidates}
    if session is not None:
        body["session_id"] = session
    if server.is_half:
        body |= BootstrapFields.of(request).plain()
    return body | _routing(request, facts, server)


def _absent(request: PreprocessedRequest) -> dict[str, Any]:
    """Return the fields that SGLang does not have, beside those that no server has."""
    guided = request.sampling_options.guided_decoding
    return {
        "stop_conditions.max_thinking_tokens": request.stop_conditions.max_thinking_tokens,
        "sampling_options.guided_decoding.backend": None if guided is None else guided.backend,
        "sampling_options.guided_decoding.whitespace_pattern": None if guided is None else guided.whitespace_pattern,
    }


def _routing(request: PreprocessedRequest, facts: ServerFacts, server: SglangServer) -> dict[str, Any]:
    """Return the fields for the adapter, the cache, the priority and the ranks."""
    if (routing := request.routing) is None:
        return {}
    fields: dict[str, Any] = {
        "lora_path": routing.lora_name,
        "extra_key": routing.cache_namespace,
        "routed_dp_rank": own_dp_rank(routing.dp_rank, facts.data_parallel_start_rank, facts.data_parallel_size),
    }
    if server.mode is DisaggregationMode.DECODE:
        fields["disagg_prefill_dp_rank"] = routing.prefill_dp_rank
    if routing.priority is not None and server.priority_sign:
        fields["priority"] = routing.priority * server.priority_sign
    return {name: value for name, value in fields.items() if value is not None}


def _sampling(request: PreprocessedRequest, server: SglangServer) -> dict[str, Any]:
    stop, sampling = request.stop_conditions, request.sampling_options
    # Without it the server would end after 128 tokens; None is as long as possible.
    params: dict[str, Any] = {"max_new_tokens": stop.max_tokens}
    known = given(stop, _STOP) | given(sampling, _SAMPLING)
    params |= {_RENAMED.get(name, name): value for name, value in known.items()}
    if not server.has_tokenizer:
        params.pop("stop", None)
    if sampling.top_k is not None:
        params["top_k"] = sampling.top_k or -1  # 0 is another way to write no limit
    if ids := stop_ids(stop):
        params["stop_token_ids"] = ids
    if (guided := sampling.guided_decoding) is not None:
        params |= _guided(guided)
    return params


def _guided(guided: GuidedDecodingOptions) -> dict[str, Any]:
    """Return the one form that the output must have."""
    if guided.json is not None:
        return {"json_schema": _text(guided.json)}
    if guided.structural_tag is not None:
        return {"structural_tag": _text(guided.structural_tag)}
    if guided.choice:
        return {"regex": "(" + "|".join(re.escape(choice) for choice in guided.choice) + ")"}
    if guided.regex is not None:
        return {"regex": guided.regex}
    return {} if guided.grammar is None else {"ebnf": guided.grammar}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else plain_to_json(value).decode()
