"""ModelRuntimeConfig: what a running worker publishes about itself: capacity, parsers, ranks, taints, topology.

Source: dynamo lib/llm/src/local_model/runtime_config.rs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args

from attrs import define

from pipeline.settings import Variable, choice, switch

from .field_rules import U16, U32, U64, InvalidRecord, null, skip

T = TypeVar("T")

TOPOLOGY_TAINT_PREFIX = "dynamo.topology/"
STOPS_PREFILLS = "stops_prefills"
"""Key of `runtime_data`: true where a prefill may be stopped after it was sent, see `EngineConfig.stops_prefills`."""

TokenizerBackend = Literal["default", "fastokens", "basetenkenizer"]

STABLE_ROUTING_ID: Variable[str | None] = Variable(
    "DYN_STABLE_ROUTING_ID", None, "Id of a worker that stays the same when it starts again.", str
)
TOKENIZER: Variable[TokenizerBackend] = Variable(
    "DYN_TOKENIZER", "default", "Tokenizer of a worker whose settings name none.", choice(*get_args(TokenizerBackend))
)
TOKENIZER_FALLBACK = Variable("DYN_TOKENIZER_FALLBACK", True, "Whether the default tokenizer may replace it.", switch)


@define(slots=True)
class DisaggregatedEndpoint:
    """Where a prefill worker waits for its decode worker."""

    bootstrap_host: str | None = None
    bootstrap_port: U16 | None = None


@define(slots=True)
class ModelRuntimeConfig:
    """A worker's own settings; not part of what makes two cards the same model.

    `taints` always holds the caller's own and one per entry of `topology_domains`. Raises InvalidRecord if topology
    and KV transfer settings contradict each other.
    """

    context_length: U32 | None = None
    total_kv_blocks: U64 | None = null()
    max_num_seqs: U64 | None = null()
    max_num_batched_tokens: U64 | None = null()
    tool_call_parser: str | None = null()
    reasoning_parser: str | None = null()
    tool_call_arguments_format: str = "json_string"
    tokenizer_backend: TokenizerBackend | None = None
    tokenizer_fallback_enabled: bool | None = None
    structural_tag_mode: str = "off"
    structural_tag_scope: str = "auto"
    structural_tag_schema: str = "auto"
    exclude_tools_when_tool_choice_none: bool = True
    data_parallel_start_rank: U32 = 0
    data_parallel_size: U32 = 1
    enable_local_indexer: bool = True
    kv_event_publishing_enabled: bool | None = None
    kv_event_source_mode: Literal["framework_v1", "state_agent_v2"] | None = None
    kv_state_endpoint: str | None = None
    runtime_data: dict[str, Any] = skip(factory=dict)
    disaggregated_endpoint: DisaggregatedEndpoint | None = None
    enable_eagle: bool = False
    taints: set[str] = skip(factory=set)
    stable_routing_id: str | None = None
    topology_domains: dict[str, str] = skip(factory=dict)
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: Literal["required", "preferred"] | None = None
    kv_transfer_preferred_weight: float | None = None
    max_gpu_lora_count: U32 | None = None

    def __attrs_post_init__(self) -> None:
        self.check_topology()
        self.rebuild_topology_taints()

    def check_topology(self) -> None:
        """Raise InvalidRecord unless domains are well formed and the KV transfer settings fit them."""
        for domain, value in self.topology_domains.items():
            if not (_is_name(domain) and _is_name(value)):
                raise InvalidRecord("names and values must be trimmed, not empty and without =", "topology_domains")
        if self.kv_transfer_domain is not None and self.kv_transfer_domain not in self.topology_domains:
            raise InvalidRecord("is not one of the topology domains", "kv_transfer_domain")
        enforcement, weight = self.kv_transfer_enforcement, self.kv_transfer_preferred_weight
        if enforcement is not None and self.kv_transfer_domain is None:
            raise InvalidRecord("needs a kv_transfer_domain", "kv_transfer_enforcement")
        if (enforcement == "preferred") != (weight is not None):
            raise InvalidRecord("goes with kv_transfer_enforcement preferred only", "kv_transfer_preferred_weight")
        if weight is not None and not 0 <= weight <= 1:
            raise InvalidRecord(f"expected a number between 0 and 1, found {weight}", "kv_transfer_preferred_weight")

    def rebuild_topology_taints(self) -> None:
        """Make the topology taints those of the domain map, whatever they were."""
        own = {taint for taint in self.taints if not taint.startswith(TOPOLOGY_TAINT_PREFIX)}
        self.taints = own | {topology_taint(domain, value) for domain, value in self.topology_domains.items()}

    def fill_from_environment(self, environment: Mapping[str, str]) -> None:
        """Take the stable routing id from the environment if none is set and one is given."""
        if self.stable_routing_id is None:
            self.stable_routing_id = STABLE_ROUTING_ID.of(environment)

    @property
    def stops_prefills(self) -> bool:
        """Whether this worker may be sent a stop for a prefill it has."""
        return self.runtime_data.get(STOPS_PREFILLS) is True

    def effective_kv_state_endpoint(self, serving_endpoint: str) -> str:
        """Return the endpoint for requests about KV state: the serving endpoint unless another is set."""
        return serving_endpoint if self.kv_state_endpoint is None else self.kv_state_endpoint

    def effective_tokenizer_backend(self, environment: Mapping[str, str]) -> TokenizerBackend:
        """Return the setting, else the environment's, else `default`. Raise InvalidRecord for an unknown name."""
        if self.tokenizer_backend is not None:
            return self.tokenizer_backend
        return _checked(TOKENIZER, environment)

    def effective_tokenizer_fallback(self, environment: Mapping[str, str]) -> bool:
        """Return the setting, else the environment's, else true. Raise InvalidRecord for a text that is no boolean."""
        if self.tokenizer_fallback_enabled is not None:
            return self.tokenizer_fallback_enabled
        return _checked(TOKENIZER_FALLBACK, environment)


def topology_taint(domain: str, value: str) -> str:
    """Return the taint of a worker's place in the topology."""
    return f"{TOPOLOGY_TAINT_PREFIX}{domain}={value}"


def _checked(variable: Variable[T], environment: Mapping[str, str]) -> T:
    if (problem := variable.problem(environment)) is not None:
        raise InvalidRecord(problem[1], variable.name)
    return variable.of(environment)


def _is_name(text: str) -> bool:
    return bool(text) and text == text.strip() and "=" not in text
