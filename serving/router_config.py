"""The settings of the KV router, from the environment, a file over it, and an option over both.

temperature 0.5 in DYN_ROUTER_TEMPERATURE ──┐
router_temperature = 0.2 in the file      ──┴► 0.2; what neither says has its default
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import asdict

from operators.kv import KvRouterConfig, config_from_environment
from pipeline import InvalidArgument

from .settings_file import read_toml, wrong

FIELD = "router_config"
"""The option that names the file."""


def kv_router_config(
    path: Path | None, environment: Mapping[str, str], use_kv_events: bool | None = None
) -> KvRouterConfig:
    """The settings in the TOML file at `path`, over those of the environment, over the defaults.

    `use_kv_events`, where it is given, goes before both. The environment must make sense on its own. Raises
    InvalidArgument for a file that cannot be read or is no TOML, with `router_config` as the field; and for settings
    that are unknown, of the wrong kind, out of range or contradictory, all of them in one text that begins with the
    path, with the first one as the field.
    """
    values: dict[str, Any] = asdict(config_from_environment(environment))
    if path is not None:
        values |= read_toml(path, FIELD)
    if use_kv_events is not None:
        values["use_kv_events"] = use_kv_events
    try:
        return KvRouterConfig.from_plain(values)
    except InvalidArgument as error:
        if path is None:
            raise
        raise wrong(path, str(error), error.field, error) from error
