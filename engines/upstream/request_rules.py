"""What requests in tokens have in common, whatever server gets them: the fields that none has, and stop ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipeline import InvalidArgument
from pipeline.protocols import PreprocessedRequest, StopConditions


def check(request: PreprocessedRequest, reason: str, absent: Mapping[str, Any]) -> None:
    """Raise InvalidArgument, with the reason, for a field without which the server would answer another request.

    `absent` are the fields that this kind of server does not have beside those that none has, with their values; None
    and False stand for a field that was not set.
    """
    sampling = request.sampling_options
    refused = {
        "prompt_embeds": request.prompt_embeds,
        "multi_modal_data": request.multi_modal_data,
        "encoder_result": request.encoder_result,
        "sampling_options.best_of": sampling.best_of not in (None, sampling.n or 1),
        "sampling_options.use_beam_search": sampling.use_beam_search,
        "sampling_options.length_penalty": sampling.length_penalty not in (None, 1.0),
        "output_options.prompt_logprobs": request.output_options.prompt_logprobs,
        **absent,
    }
    for name, value in refused.items():
        if value is not None and value is not False:
            raise InvalidArgument(reason, field=name)
    if not request.token_ids:
        raise InvalidArgument("a prompt has at least one token", field="token_ids")
    if sampling.n is not None and sampling.n < 1:
        raise InvalidArgument(f"must be at least 1, got {sampling.n}", field="sampling_options.n")


def given(part: object, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields that are set, by name."""
    return {name: value for name in names if (value := getattr(part, name)) is not None}


def stop_ids(stop: StopConditions) -> list[int]:
    """Return the ids that end an answer at the server; none if ends of its own are ignored."""
    if stop.ignore_eos:
        return []
    return sorted(
        {*(stop.stop_token_ids or ()), *(stop.stop_token_ids_visible or ()), *(stop.stop_token_ids_hidden or ())}
    )
