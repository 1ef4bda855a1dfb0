"""How the tokens of a request are drawn and when they end, as values: no tensors here.

The draw at a place of a sequence depends on the seed, the choice and the place alone. So a request draws the same
tokens whatever is computed beside it, and a migrated one, whose prompt ends with what it has generated, continues with
the draws it would have had.

Source: vllm/sampling_params.py, SamplingParams, for the meaning of each option. Other than there, a request without
temperature takes the default of the settings.
"""

from __future__ import annotations

from math import inf, isfinite
from random import Random

from attrs import frozen

from pipeline import InvalidArgument
from pipeline.protocols import FinishReason, PreprocessedRequest, SamplingOptions

GREEDY_BELOW = 1e-5
"""A lower temperature counts as 0."""


@frozen(kw_only=True)
class Sampling:
    """How one choice draws its tokens, and what is reported of each."""

    temperature: float = 0.0
    """0: the most likely token."""
    top_k: int = 0
    """Most likely tokens that are drawn from; 0: all."""
    top_p: float = 1.0
    """Share of the probability, of the most likely tokens, that is drawn from."""
    min_p: float = 0.0
    """Least probability, as a share of that of the most likely token."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token generated before."""
    frequency_penalty: float = 0.0
    """The same for each time it was generated."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in the prompt or the answer, and multiplies negative ones."""
    seed: int = 0
    """Of the draws."""
    logprobs: int | None = None
    """Most likely tokens reported beside each token; None: no log probabilities."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    def uniform(self, choice: int, place: int) -> float:
        """Return the draw, from 0 to below 1, of a choice at a place of its sequence, counted with the prompt."""
        return Random(f"{self.seed}/{choice}/{place}").random()


@frozen(kw_only=True)
class Limits:
    """When one choice ends."""

    max_tokens: int
    """Most tokens generated, by the request and by the room that the engine has."""
    min_tokens: int = 0
    """Tokens before which no id ends it."""
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()

    def ending(self, generated: int, token_id: int) -> tuple[FinishReason, int | None] | None:
        """Return why the choice ends with this token, its `generated`-th, and the stop id; None: it goes on."""
        if generated >= self.min_tokens:
            if token_id in self.eos_token_ids:
                return FinishReason.EOS, None
            if token_id in self.stop_token_ids:
                return FinishReason.STOP, token_id
        return (FinishReason.LENGTH, None) if generated >= self.max_tokens else None

    def forbidden(self, generated: int) -> frozenset[int]:
        """Return the ids that may not be drawn next, after so many tokens: those that would end it too early."""
        if generated + 1 >= self.min_tokens:
            return frozenset()
        return self.eos_token_ids | self.stop_token_ids


def sampling_of(request: PreprocessedRequest, *, default_temperature: float, seed: int) -> Sampling:
    """Return how the request's tokens are drawn; `seed` counts if it names none.

    Raise InvalidArgument, naming the field, for an option out of range and for one that is not offered.
    """
    options = request.sampling_options
    _refuse_unoffered(options)
    temperature = default_temperature if options.temperature is None else options.temperature
    return Sampling(
        temperature=_within(temperature, "temperature", 0, inf),
        top_k=max(0, options.top_k or 0),
        top_p=_within(1.0 if options.top_p is None else options.top_p, "top_p", 0, 1),
        min_p=_within(options.min_p or 0.0, "min_p", 0, 1),
        presence_penalty=_within(options.presence_penalty or 0.0, "presence_penalty", -2, 2),
        frequency_penalty=_within(options.frequency_penalty or 0.0, "frequency_penalty", -2, 2),
        repetition_penalty=_positive(1.0 if options.repetition_penalty is None else options.repetition_penalty),
        seed=seed if options.seed is None else options.seed,
        logprobs=request.output_options.logprobs,
    )


def _refuse_unoffered(options: SamplingOptions) -> None:
    if options.use_beam_search:
        raise InvalidArgument("there is no beam search", field="use_beam_search")
    if options.best_of is not None and options.best_of != (options.n or 1):
        raise InvalidArgument("best_of must equal n: choices are not ranked", field="best_of")
    if options.guided_decoding is not None and options.guided_decoding.kinds():
        raise InvalidArgument("there is no guided decoding", field="guided_decoding")


def _within(value: float, field: str, low: float, high: float) -> float:
    if not (isfinite(value) and low <= value <= high):
        bounds = f"at least {low}" if high == inf else f"from {low} to {high}"
        raise InvalidArgument(f"{field} must be {bounds}, got {value}", field=field)
    return value


def _positive(penalty: float) -> float:
    if not (isfinite(penalty) and penalty > 0):
        raise InvalidArgument(f"repetition_penalty must be above 0, got {penalty}", field="repetition_penalty")
    return penalty
