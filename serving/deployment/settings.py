"""The settings of the KV router, from the environment, a file over it, and an option over both.

temperature 0.5 in DYN_ROUTER_TEMPERATURE ──┐
router_temperature = 0.2 in the file      ──┴► 0.2; other settings have their defaults

The file that `router_policy_config` names: who waits for a worker, in which classes and in which order.

Source: dynamo lib/kv-router/src/scheduling/policy_config.rs, RouterPolicyConfig. Other than there a file whose name
ends in `.toml` is read as TOML; all others are YAML.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import asdict

from operators.kv import KvRouterConfig, PolicyDocument, PolicyProfile, config_from_environment
from pipeline import InvalidArgument

from ..settings_file import read_toml, read_yaml, wrong

FIELD = "router_config"
"""The option that names the file."""


def kv_router_config(
    written: Path | Mapping[str, Any] | None, environment: Mapping[str, str], use_kv_events: bool | None = None
) -> KvRouterConfig:
    """Return the settings of the router from a file and the environment.

    Those of a TOML file at a path come before the environment's, those of a table of the program's own settings file
    after them; `use_kv_events`, where given, comes before both. The environment must make sense on its own. Raise
    InvalidArgument for a file that cannot be read or is not TOML, with `router_config` as the field; and for settings
    that are unknown, of the wrong kind, out of range or contradictory, all of them in one text that begins with the
    path, with the first one as the field.
    """
    if isinstance(written, Path):
        values: dict[str, Any] = asdict(config_from_environment(environment)) | read_toml(written, FIELD)
    else:
        values = asdict(config_from_environment(environment, written))
    if use_kv_events is not None:
        values["use_kv_events"] = use_kv_events
    try:
        return KvRouterConfig.from_plain(values)
    except InvalidArgument as error:
        if not isinstance(written, Path):
            raise
        raise wrong(written, str(error), error.field, error) from error


POLICY_FIELD = "router_policy_config"
"""The setting that names the file."""


def policy_document(path: str | Path) -> PolicyDocument:
    """Return all profiles of a file.

    Raise InvalidArgument, with `router_policy_config` as the field and the path, the place and what is wrong there in
    its text, for a file that cannot be read, is malformed, or has values that cannot be.
    """
    file = Path(path)
    plain = read_toml(file, POLICY_FIELD) if file.suffix.lower() == ".toml" else read_yaml(file, POLICY_FIELD)
    try:
        return PolicyDocument.from_plain(plain)
    except InvalidArgument as error:
        place = f"{error.field}: " if error.field else ""
        raise wrong(file, f"{place}{error}", POLICY_FIELD, error) from error


def policy_profile(path: str | Path, model_name: str | None, config: KvRouterConfig | None = None) -> PolicyProfile:
    """Return the profile for a model: its own in the file, else the file's for all, else that of the plain settings.

    They are never merged. Raise as `policy_document`.
    """
    otherwise = PolicyProfile.from_config(KvRouterConfig() if config is None else config)
    return policy_document(path).profile_for(model_name, otherwise)
