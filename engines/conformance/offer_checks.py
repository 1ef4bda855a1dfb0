"""The check of an engine that offers tokens (L8): taken past its generator, they are those that it would have yielded.

The other checks read generators, where every offer is refused and noted. Of an engine that offers, this one reads an
answer behind the adapter of a host, whose stream is fed.
"""

from __future__ import annotations

from copy import deepcopy

from pipeline import Context, Gate

from ..adapter import RequestAdapter
from .answers import Trial
from .bounded_calls import bounded
from .failures import failed


async def check_offers(trial: Trial) -> None:
    """Raises OfferedTokensMismatch and OfferedUsageMismatch, and GenerateFailed."""
    if not trial.offers or (trial.request.sampling_options.n or 1) > 1:
        return
    tokens: list[int] = []
    offered = 0
    counted: int | None = None

    def take(token_id: int, index: int | None) -> bool:
        nonlocal offered
        offered += 1
        tokens.append(token_id)
        return True

    async def read() -> None:
        nonlocal counted
        async with await RequestAdapter(trial.engine).generate(Context(deepcopy(trial.request))) as stream:
            stream.feed(take, Gate())
            async for item in stream:
                if (output := item.ok().data) is not None:
                    tokens.extend(output.token_ids)
                    if output.completion_usage is not None and output.finish_reason is not None:
                        counted = output.completion_usage.completion_tokens

    await bounded("GenerateFailed", "an answer whose offers are taken", read, trial.within_s)
    if trial.is_steady and tuple(tokens) != trial.plain.tokens[0]:
        raise failed("OfferedTokensMismatch", f"{list(trial.plain.tokens[0])} yielded, {tokens} with {offered} offered")
    if counted not in (None, len(tokens)):
        raise failed("OfferedUsageMismatch", f"{counted} of {len(tokens)}, {offered} of them offered")
