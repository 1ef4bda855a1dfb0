"""RouteRequest: what a request needs of the router, read from its routing hints.

Source: dynamo lib/llm/src/kv_router/push_router.rs, select_worker. Other than there a request that names its worker
goes the same way as all others, so allowed workers, taints and the queue hold for it too, and its rank is checked.

HashedPrompts: the blocks of a request's prompt, shared by all routers it passes, so that each is hashed once.

PrefillRouter puts it into the registry ──► bypass, prefill pool, KvPushRouter of prefill and of decode: find it
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from collections.abc import Set as AbstractSet

from attrs import define, evolve, field

from pipeline import AnyContext, InvalidArgument, WorkerOverloaded
from pipeline.foreign import foreign_errors
from pipeline.protocols import PreprocessedRequest, RouterConfigOverride, RoutingConstraints, RoutingHints
from pipeline.protocols.timing import RequestPhase
from pipeline.threads import GiveUp

from ..text import offered_threads
from .eligibility import RoutingRules, WorkerPool, narrowed_to_adapter
from .prompt import PromptBlocks
from .types import WorkerRank

POLICY_CLASS = "policy-class"
"""Key of the context's metadata that names the request's queue class or family."""


_NO_HINTS, _NO_CONSTRAINTS = RoutingHints(), RoutingConstraints()
"""What most requests have; nothing here changes them."""


@define(kw_only=True, eq=False)
class RouteRequest:
    """A prompt, the workers that may take it, and how urgent it is."""

    blocks: PromptBlocks
    worker_id: int | None = None
    """The only worker it may go to; None for any."""
    dp_rank: int | None = None
    """The rank of that worker; None if it has just one."""
    allowed_worker_ids: AbstractSet[int] | None = None
    """The workers it may go to; None for all."""
    constraints: RoutingConstraints = field(factory=RoutingConstraints)
    """Taints that its worker must carry, or should."""
    override: RouterConfigOverride | None = None
    """Settings of the router for this request."""
    priority_jump_s: float = 0.0
    """Its turn comes as if it had arrived so many seconds earlier."""
    strict_priority: int = 0
    """Requests of a higher one go first."""
    policy_class: str | None = None
    """The queue class or family it names."""
    failed_worker_ids: AbstractSet[int] = frozenset()
    """The workers it has failed on, to which it must not return."""
    is_overload: bool = False
    """Whether the last of them was overloaded."""
    prompt_tokens: int = 0
    """Tokens of the prompt as the worker counts them; output blocks begin behind them."""
    expected_output_tokens: int | None = None
    """Length of the answer that the client expects."""

    @classmethod
    def of_request(
        cls,
        request: PreprocessedRequest,
        block_size_tokens: int,
        *,
        phase: RequestPhase = RequestPhase.AGGREGATED,
        is_eagle: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> RouteRequest:
        """Read the hints of a request in this phase."""
        hints = request.routing or _NO_HINTS
        worker_id, dp_rank = named_worker(hints, phase)
        state = request.migration_state
        return cls(
            blocks=PromptBlocks.of_request(request, block_size_tokens, is_eagle=is_eagle),
            worker_id=worker_id,
            dp_rank=dp_rank,
            allowed_worker_ids=hints.allowed_worker_ids,
            constraints=hints.routing_constraints or _NO_CONSTRAINTS,
            override=request.router_config_override,
            priority_jump_s=hints.priority_jump or 0.0,
            strict_priority=hints.strict_priority or 0,
            policy_class=(metadata or {}).get(POLICY_CLASS),
            failed_worker_ids=frozenset() if state is None else frozenset(state.excluded_worker_ids),
            is_overload=state is not None and isinstance(state.last_error, WorkerOverloaded),
            prompt_tokens=len(request.token_ids),
            expected_output_tokens=hints.expected_output_tokens,
        )

    @property
    def partition(self) -> Hashable:
        """What restricts the choice of workers, None if nothing does. Requests with the same wait in one line."""
        required, adapter, failed = (
            self.constraints.required_taints,
            self.blocks.lora_name or None,
            self.failed_worker_ids,
        )
        if self.worker_id is None and self.allowed_worker_ids is None and not (required or adapter or failed):
            return None
        allowed = None if self.allowed_worker_ids is None else frozenset(self.allowed_worker_ids)
        return self.worker_id, self.dp_rank, allowed, frozenset(required), adapter, failed

    def rules(self, pool: WorkerPool) -> RoutingRules:
        """The rules for these workers. Raises InvalidArgument if the named worker has several ranks and none is named.

        A worker that is not there keeps its first rank, so that the pool can name what is wrong with it. A request with
        an adapter and without a named worker goes to the workers that have it loaded, if an allowed one has.
        """
        allowed, adapter = self.allowed_worker_ids, self.blocks.lora_name
        pin = None if self.worker_id is None else self._pin(pool, self.worker_id)
        if pin is None and adapter and (holders := pool.adapters.get(adapter)):
            there = pool.configs.keys() if pool.available is None else pool.configs.keys() & pool.available
            allowed = narrowed_to_adapter(allowed, holders, there)
        return RoutingRules(pin, allowed, self.constraints, self.failed_worker_ids, self.is_overload)

    def _pin(self, pool: WorkerPool, worker_id: int) -> WorkerRank:
        if self.dp_rank is not None:
            return WorkerRank(worker_id, self.dp_rank)
        ranks = pool.ranks.get(worker_id, range(1))
        if len(ranks) > 1:
            text = f"worker {worker_id} has ranks {ranks.start} to {ranks.stop - 1}: the request must name one"
            raise InvalidArgument(text, field="routing.dp_rank")
        return WorkerRank(worker_id, ranks[0])


def named_worker(hints: RoutingHints, phase: RequestPhase) -> tuple[int | None, int | None]:
    """The worker and rank a request names for this phase; the worker for all phases is the fallback."""
    backend, dp_rank = hints.backend_instance_id, hints.dp_rank
    if phase is RequestPhase.PREFILL:
        rank = dp_rank if hints.prefill_dp_rank is None else hints.prefill_dp_rank
        return (backend if hints.prefill_worker_id is None else hints.prefill_worker_id), rank
    if phase is RequestPhase.DECODE and hints.decode_worker_id is not None:
        return hints.decode_worker_id, dp_rank
    return backend, dp_rank


_KEY = "hashed_prompts"


class HashedPrompts(dict[tuple[int, str | None, str | None, bool], PromptBlocks]):
    """The last prompt that was cut in each way: by block size, adapter, tenant and look-ahead."""

    def of(self, blocks: PromptBlocks) -> PromptBlocks:
        """Return the blocks of the same prompt that an earlier router has hashed; else these, and keep them.

        The same means the same token list: to compare equal ones would take as long as to hash them.
        """
        way = blocks.block_size_tokens, blocks.lora_name, blocks.cache_namespace, blocks.is_eagle
        known = self.get(way)
        if known is None or known.token_ids is not blocks.token_ids or known.media != blocks.media:
            known = self[way] = blocks
        return known


def share_hashes(request: AnyContext) -> None:
    """Have all routers of the request share the hashes of its prompt, from now on."""
    if request.registry.get_optional(_KEY, HashedPrompts) is None:
        request.registry.insert_shared(_KEY, HashedPrompts())


def with_shared_hashes(route: RouteRequest, request: AnyContext) -> RouteRequest:
    """The request with the hashes of earlier routers, if they are shared."""
    if (known := request.registry.get_optional(_KEY, HashedPrompts)) is None:
        return route
    blocks = known.of(route.blocks)
    return route if blocks is route.blocks else evolve(route, blocks=blocks)


async def hash_beside_the_loop(route: RouteRequest, request: AnyContext, *, chained: bool) -> None:
    """Hash the blocks of a long prompt in the threads that come with it, so that the router finds them hashed.

    With `chained` their sequence hashes are made too. Raises as `PromptThreads.run`. Does nothing for a short prompt,
    which is hashed where it is looked up.
    """
    blocks, threads = route.blocks, offered_threads(request)
    if threads is None:
        return

    def work(give_up: GiveUp) -> None:
        _ = blocks.local_hashes
        if chained:
            give_up()
            _ = blocks.sequence_hashes

    with foreign_errors():
        await threads.run(work, request.control)
