"""What a router needs besides its settings, and the settings it does not offer, found all at once."""

from __future__ import annotations

from .config import KvRouterConfig, raise_problems
from .config_checks import Problem


def check_router(
    config: KvRouterConfig, block_size_tokens: int, *, prefill_duration: object, profile: object, peers: object
) -> None:
    """Raise InvalidArgument that lists every problem; `field` names the first.

    The last three are what the router was given for `router_prefill_load_model`, `router_policy_config` and
    `router_replica_sync`, None for nothing. What no router of this kind offers at all is refused, not passed over.
    """
    raise_problems(
        [*_missing(config, block_size_tokens, prefill_duration, profile, peers), *_not_offered(config)],
    )


def _missing(
    config: KvRouterConfig, block_size_tokens: int, prefill_duration: object, profile: object, peers: object
) -> list[Problem]:
    checks: list[tuple[bool, str, str]] = [
        (block_size_tokens < 1, "block_size_tokens", f"must be at least 1, got {block_size_tokens}"),
        (
            config.router_prefill_load_model != "none" and prefill_duration is None,
            "prefill_duration",
            "router_prefill_load_model needs it, and it can only be given in code",
        ),
        (
            config.router_policy_config is not None and profile is None,
            "profile",
            "router_policy_config names a file whose profile is not given",
        ),
        (config.router_replica_sync and peers is None, "peers", "router_replica_sync needs them"),
        (peers is not None and not config.router_replica_sync, "router_replica_sync", "is off, but peers are given"),
    ]
    return [(name, message) for broken, name, message in checks if broken]


def _not_offered(config: KvRouterConfig) -> list[Problem]:
    checks: list[tuple[bool, str, str]] = [
        (config.use_remote_indexer, "use_remote_indexer", "a remote index is not offered"),
        (config.serve_indexer, "serve_indexer", "serving the index is not offered"),
        (config.shared_cache_type != "none", "shared_cache_type", "a shared cache is not offered"),
        (config.shared_cache_multiplier > 0, "shared_cache_multiplier", "a shared cache is not offered"),
        (config.router_prefill_policy is not None, "router_prefill_policy", "named selections are not offered"),
        (config.router_decode_policy is not None, "router_decode_policy", "named selections are not offered"),
    ]
    return [(name, message) for broken, name, message in checks if broken]
