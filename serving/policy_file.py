"""The file that `router_policy_config` names: who waits for a worker, in which classes and in which order.

Source: dynamo lib/kv-router/src/scheduling/policy_config.rs, RouterPolicyConfig. Other than there a file whose name
ends in `.toml` is read as TOML; all others are YAML.
"""

from __future__ import annotations

from pathlib import Path

from operators.kv import KvRouterConfig, PolicyDocument, PolicyProfile
from pipeline import InvalidArgument

from .settings_file import read_toml, read_yaml, wrong

FIELD = "router_policy_config"
"""The setting that names the file."""


def policy_document(path: str | Path) -> PolicyDocument:
    """All profiles of a file.

    Raises InvalidArgument, with `router_policy_config` as the field and the path, the place and what is wrong there in
    its text, for a file that cannot be read, is malformed, or says something that cannot be.
    """
    file = Path(path)
    plain = read_toml(file, FIELD) if file.suffix.lower() == ".toml" else read_yaml(file, FIELD)
    try:
        return PolicyDocument.from_plain(plain)
    except InvalidArgument as error:
        place = f"{error.field}: " if error.field else ""
        raise wrong(file, f"{place}{error}", FIELD, error) from error


def policy_profile(path: str | Path, model_name: str | None, config: KvRouterConfig | None = None) -> PolicyProfile:
    """The profile for a model: its own in the file, else the file's for all, else what the plain settings say.

    They are never merged. Raises as `policy_document`.
    """
    otherwise = PolicyProfile.from_config(KvRouterConfig() if config is None else config)
    return policy_document(path).profile_for(model_name, otherwise)
