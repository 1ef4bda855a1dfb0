"""HashedPrompts: the blocks of a request's prompt, shared by all routers it passes, so that each is hashed once.

PrefillRouter puts it into the registry ──► bypass, prefill pool, KvPushRouter of prefill and of decode: find it
"""

from __future__ import annotations

from attrs import evolve

from pipeline import AnyContext
from pipeline.foreign import foreign_errors

from ..prompt_threads import GiveUp, offered_threads
from .block_hash import PromptBlocks
from .router_request import RouteRequest

_KEY = "hashed_prompts"


class HashedPrompts:
    """The last prompt that was cut in each way: by block size, adapter, tenant and look-ahead."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[int, str | None, str | None, bool], PromptBlocks] = {}

    def of(self, blocks: PromptBlocks) -> PromptBlocks:
        """The same blocks, hashed already if they were met before; these, and from now on these, if not.

        The same are only those of the very same tokens: equal ones would take as long to compare as to hash.
        """
        way = blocks.block_size_tokens, blocks.lora_name, blocks.cache_namespace, blocks.is_eagle
        known = self._known.get(way)
        if known is None or known.token_ids is not blocks.token_ids or known.media != blocks.media:
            known = self._known[way] = blocks
        return known


def share_hashes(request: AnyContext) -> None:
    """From now on all routers of the request share what they hash."""
    if request.registry.get_optional(_KEY, HashedPrompts) is None:
        request.registry.insert_shared(_KEY, HashedPrompts())


def with_shared_hashes(route: RouteRequest, request: AnyContext) -> RouteRequest:
    """What the request asks of a router, with the hashes of those before, if they are shared."""
    known = request.registry.get_optional(_KEY, HashedPrompts)
    if known is None:
        return route
    blocks = known.of(route.blocks)
    return route if blocks is route.blocks else evolve(route, blocks=blocks)


async def hash_beside_the_loop(route: RouteRequest, request: AnyContext) -> None:
    """Hash the blocks of a long prompt in the threads that come with it, so that the router finds them hashed.

    Raises as `PromptThreads.run`. Does nothing for a short prompt, which is hashed where it is looked up.
    """
    blocks, threads = route.blocks, offered_threads(request)
    if threads is None:
        return

    def work(give_up: GiveUp) -> None:
        _ = blocks.local_hashes
        give_up()
        _ = blocks.sequence_hashes

    with foreign_errors():
        await threads.run(work, request.control)
