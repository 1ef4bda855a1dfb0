"""Order: what a request wants of the engine, checked."""

from __future__ import annotations

from collections.abc import Collection

from attrs import frozen

from pipeline import InvalidArgument
from pipeline.llm import hash_seed
from pipeline.protocols import PreprocessedRequest, StopConditions

from .sampling import Limits, Sampling, sampling_of


@frozen(kw_only=True)
class ModelFacts:
    """What requests are checked against."""

    vocab_size: int
    """Token ids are below this."""
    capacity_tokens: int
    """Most tokens of a prompt and its answer: by the model, and by the room in the KV cache."""
    eos_token_ids: Collection[int] = ()
    """Ids that end a sequence, beside those of the request."""
    adapters: Collection[str] = ()
    """Names of LoRA adapters."""
    default_temperature: float = 0.0
    """Temperature of requests that name none."""


@frozen(kw_only=True)
class Order:
    """A prompt and how its choices are generated."""

    prompt: list[int]
    choices: int
    sampling: Sampling
    limits: Limits
    hash_seed: int
    """Seed of its blocks' hashes: other tenants and adapters have other blocks."""
    adapter: str | None = None
    """The LoRA adapter that it is computed with."""


def order_of(request: PreprocessedRequest, facts: ModelFacts, *, seed: int) -> Order:
    """Return the order of a request; its draws have this `seed` if it names none.

    Raise InvalidArgument, naming the field, for a request that cannot be served as it is.
    """
    _refuse_unoffered(request)
    adapter = _adapter(request, facts.adapters)
    prompt = list(request.token_ids)
    if not prompt:
        raise InvalidArgument("the prompt has no tokens", field="token_ids")
    if max(prompt) >= facts.vocab_size or min(prompt) < 0:
        raise InvalidArgument(f"token ids of this model are below {facts.vocab_size}", field="token_ids")
    room = facts.capacity_tokens - len(prompt)
    if room < 1:
        raise InvalidArgument(
            f"the prompt has {len(prompt)} tokens; there is room for {facts.capacity_tokens - 1} and one of the answer",
            field="token_ids",
        )
    choices = 1 if request.sampling_options.n is None else request.sampling_options.n
    if choices < 1:
        raise InvalidArgument(f"n must be at least 1, got {choices}", field="n")
    return Order(
        prompt=prompt,
        choices=choices,
        sampling=sampling_of(request, default_temperature=facts.default_temperature, seed=seed),
        limits=_limits(request, facts.eos_token_ids, room),
        hash_seed=hash_seed(adapter, request.routing.cache_namespace if request.routing else None),
        adapter=adapter,
    )


def _refuse_unoffered(request: PreprocessedRequest) -> None:
    if request.prompt_embeds is not None:
        raise InvalidArgument("a prompt is given in tokens here, not in embeddings", field="prompt_embeds")
    if request.multi_modal_data:
        raise InvalidArgument("there are no media here", field="multi_modal_data")
    if request.output_options.prompt_logprobs is not None:
        raise InvalidArgument("log probabilities of prompts are not computed", field="prompt_logprobs")
    if request.stop_conditions.max_thinking_tokens is not None:
        raise InvalidArgument("there is no limit of the reasoning part", field="max_thinking_tokens")


def _adapter(request: PreprocessedRequest, known: Collection[str]) -> str | None:
    """Return the adapter that the request names. Raises InvalidArgument for one that is not here."""
    name = request.routing.lora_name if request.routing is not None else None
    if name and name not in known:
        raise InvalidArgument(f"there is no adapter {name!r} here", field="lora_name")
    return name or None


def _limits(request: PreprocessedRequest, eos_token_ids: Collection[int], room: int) -> Limits:
    """Return when the choices end. Raises InvalidArgument for limits that contradict each other."""
    stop = request.stop_conditions
    least, most = stop.min_tokens or 0, stop.max_tokens
    if most is not None and least > most:
        raise InvalidArgument(f"max_tokens is {most}, which is below min_tokens, {least}", field="max_tokens")
    eos = frozenset() if stop.ignore_eos else frozenset([*request.eos_token_ids, *eos_token_ids])
    return Limits(
        max_tokens=room if most is None else min(most, room),
        min_tokens=least,
        eos_token_ids=eos,
        stop_token_ids=_stop_ids(stop) - eos,
    )


def _stop_ids(stop: StopConditions) -> frozenset[int]:
    if stop.ignore_eos:
        return frozenset()
    listed = (stop.stop_token_ids, stop.stop_token_ids_visible, stop.stop_token_ids_hidden)
    return frozenset(token_id for ids in listed for token_id in ids or ())
