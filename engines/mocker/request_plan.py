"""RequestPlan: what a request will be answered with, decided before anything is scheduled.

Source: dynamo lib/mocker/src/engine_adapter.rs. Other than there, a request may ask for several choices and may leave
its length open.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from attrs import evolve, frozen

from pipeline import InvalidArgument
from pipeline.block_hash import hash_seed
from pipeline.protocols import PreprocessedRequest, StopConditions

from ..roles import is_handed_over
from .args import MockEngineArgs, WorkerType
from .recorded import left_to_say
from .sequence import Sequence
from .tokens import Output

DEFAULT_OUTPUT_TOKENS = 16
"""For a request that names no limit."""

_CHOICE_SEED = 0x9E3779B97F4A7C15
_U64 = 2**64


@frozen
class RequestPlan:
    """The answer as it will be unless something ends it: so many choices of the same length from one prompt."""

    prompt: Items[int]
    output_tokens: int
    outputs: tuple[Output, ...]
    """What each choice says."""
    hash_seed: int
    logprobs: int | None
    """How many other candidates come with each token; None: no log probabilities."""
    pays_prompt: bool = False
    """Whether the prompt takes time even on a decode worker: nobody else computes it."""

    def sequences(self, block_size: int, dp_rank: int) -> list[Sequence]:
        """One for each choice."""
        return [
            Sequence(
                self.prompt,
                self.output_tokens,
                block_size=block_size,
                owner=index,
                output=output,
                dp_rank=dp_rank,
                hash_seed=self.hash_seed,
            )
            for index, output in enumerate(self.outputs)
        ]


def plan_request(
    request: PreprocessedRequest,
    args: MockEngineArgs,
    *,
    token_ids: range | None = None,
    recorded: Items[int] | None = None,
) -> RequestPlan:
    """Decides the answer. `recorded` are the tokens to say, of a request whose answer is known; a limit cuts them, and
    of a request that began elsewhere they are the rest. Made up ones are from `token_ids`.

    Raises InvalidArgument, naming the field, for what cannot be answered.
    """
    if request.prompt_embeds is not None:
        raise InvalidArgument("a mock engine has no use for embeddings", field="prompt_embeds")
    if not request.token_ids:
        raise InvalidArgument("the prompt has no tokens", field="token_ids")
    options, stop, routing = request.sampling_options, request.stop_conditions, request.routing
    choices = 1 if options.n is None else options.n
    if choices < 1:
        raise InvalidArgument(f"n must be at least 1, got {choices}", field="n")
    if recorded is not None:
        if not recorded:
            raise InvalidArgument("a recorded answer has at least one output token", field="output_token_ids")
        recorded = left_to_say(recorded, request)
    wanted = _output_tokens(stop, args.worker_type, recorded)
    seed = (options.seed or 0) % _U64
    outputs = (
        _output(args, wanted, (seed + choice * _CHOICE_SEED) % _U64, token_ids, recorded) for choice in range(choices)
    )
    adapter, namespace = (None, None) if routing is None else (routing.lora_name, routing.cache_namespace)
    return RequestPlan(
        request.token_ids,
        wanted,
        tuple(outputs),
        hash_seed(adapter, namespace),
        request.output_options.logprobs,
        pays_prompt=not is_handed_over(request),
    )


def _output_tokens(stop: StopConditions, worker_type: WorkerType, recorded: Items[int] | None) -> int:
    """How many tokens a request gets, if nothing ends it."""
    wanted = 1 if worker_type == "prefill" else stop.max_tokens
    if recorded is not None:
        return len(recorded) if wanted is None else min(wanted, len(recorded))
    return max(DEFAULT_OUTPUT_TOKENS, stop.min_tokens or 0) if wanted is None else wanted


def _output(
    args: MockEngineArgs, output_tokens: int, seed: int, token_ids: range | None, recorded: Items[int] | None
) -> Output:
    if recorded is not None:
        return Output(seed, planned=recorded)
    output = Output(seed) if args.reasoning is None else Output.thought(args.reasoning, output_tokens, seed=seed)
    return output if token_ids is None else evolve(output, token_ids=token_ids)


def checked_rank(request: PreprocessedRequest, args: MockEngineArgs) -> int | None:
    """The rank the request names, if it does. Raises InvalidArgument for one that is not there."""
    if request.routing is None:
        return None
    rank = request.routing.dp_rank
    if args.worker_type == "prefill" and request.routing.prefill_dp_rank is not None:
        rank = request.routing.prefill_dp_rank
    if rank is not None and rank >= args.dp_size:
        raise InvalidArgument(f"there is no rank {rank}, only {args.dp_size}", field="dp_rank")
    return rank
