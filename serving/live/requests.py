"""A request in tokens -> the headers and the body of `POST /v1/completions`. Pure."""

from __future__ import annotations

import re
from typing import Any

from pipeline import AnyContext, InvalidArgument
from pipeline.protocols import PreprocessedRequest
from pipeline.tracing import inject

from ..openai import encode

EXTRA_FIELDS = ("worker_id", "timing", "completion_token_ids")
"""What a server that knows `nvext` is asked to say beside the text."""

_STOP = ("max_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids")
_SAMPLING = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
    *("use_beam_search", "length_penalty", "seed", "include_stop_str_in_output"),
)
_SESSION = "x-dynamo-session-id"
_METADATA = "x-dynamo-meta-"
_NOT_PRINTABLE = re.compile(r"[^\x20-\x7e]+")
_NO_NAME = re.compile(r"[^A-Za-z0-9!#$%&'*+.^_`|~-]+")


def completion(request: PreprocessedRequest, model: str, *, nvext: bool) -> bytes:
    """The body. Raises InvalidArgument for what a completion in token ids cannot say."""
    _check(request)
    stop, sampling = request.stop_conditions, request.sampling_options
    body: dict[str, Any] = {"model": model, "prompt": request.token_ids, "stream": True}
    for part, names in ((stop, _STOP), (sampling, _SAMPLING)):
        body |= {name: value for name in names if (value := getattr(part, name)) is not None}
    # Running totals say how many tokens a chunk holds where no ids do.
    body["stream_options"] = {"include_usage": True} | ({} if nvext else {"continuous_usage_stats": True})
    if nvext:
        body["nvext"] = {"extra_fields": list(EXTRA_FIELDS)} | _extras(request)
    return encode(body)


def headers_of(request: AnyContext, api_key: str | None) -> dict[str, str]:
    """The headers of one request: its id, session, metadata, its span if it is traced, and the key."""
    headers = {"content-type": "application/json", "accept": "text/event-stream", "x-request-id": _value(request.id)}
    for name, value in request.metadata.items():
        name = _NO_NAME.sub("-", name.lower())
        headers[name if name == _SESSION else _METADATA + name] = _value(value)
    return headers | inject(request) | authorization(api_key)


def authorization(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"authorization": _value(f"Bearer {api_key}")}


def _value(text: str) -> str:
    """As a header may have it."""
    return _NOT_PRINTABLE.sub("?", text.strip())


def _check(request: PreprocessedRequest) -> None:
    """A completion that left these out would answer another request."""
    said = {
        "prompt_embeds": request.prompt_embeds,
        "multi_modal_data": request.multi_modal_data,
        "prefill_result": request.prefill_result,
        "sampling_options.guided_decoding": request.sampling_options.guided_decoding,
        "sampling_options.n": (request.sampling_options.n or 1) > 1,
        "output_options.logprobs": request.output_options.logprobs,
    }
    for name, value in said.items():
        if value is not None and value is not False:
            raise InvalidArgument("is nothing that a live server can be asked for", field=name)


def _extras(request: PreprocessedRequest) -> dict[str, Any]:
    """What else it says of itself: its annotations, and how urgent it is."""
    extras: dict[str, Any] = {"annotations": request.annotations} if request.annotations else {}
    if (routing := request.routing) is not None:
        known = {"priority": routing.priority, "strict_priority": routing.strict_priority}
        said = {name: value for name, value in known.items() if value is not None}
        extras |= {"agent_hints": said} if said else {}
    return extras
