"""Where the valid keys come from: a file, a variable, or both.

    [[key]]
    name = "search"
    hash = "sha256:..."                # as `penstock key new` prints it
    models = ["llama"]                 # all, if left out
    requests_per_minute = 600
    tokens_per_minute = 200000
    priority = 5
    tenant = "search"
    privileges = ["pin", "priority", "tenant", "admin"]

`PENSTOCK_API_KEY` holds plain keys with commas between them, for the simple case: such a key may use all models, at any
rate, without privileges.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from attrs import frozen

from pipeline import InvalidArgument
from pipeline.wire import from_plain

from ..settings_file import read_toml, wrong
from .keys import ApiKey, check_distinct, hash_of

FIELD = "api_keys"
"""The option that names the file."""
VARIABLE = "PENSTOCK_API_KEY"
_MISTAKEN = "PENSTOCK_API_KEYS"


@frozen
class _KeyFile:
    wire_closed: ClassVar[bool] = True

    key: list[ApiKey]


def all_keys(path: Path | None, environment: Mapping[str, str]) -> list[ApiKey]:
    """Return the keys of the file and of the variable; empty if neither is set.

    Raise InvalidArgument for a file that cannot be read or holds no keys, for a key that is too short, and for two keys
    of one name or hash. No error shows a key.
    """
    if environment.get(_MISTAKEN, "").strip():
        text = f"{_MISTAKEN} is not read: plain keys are set in {VARIABLE}, the file in PENSTOCK_API_KEYS_FILE"
        raise InvalidArgument(text)
    keys = keys_of_variable(environment) + ([] if path is None else keys_of_file(path))
    _distinct(keys, path)
    return keys


def keys_of_file(path: Path) -> list[ApiKey]:
    """Return the keys of a file, at least one: an emptied file must not switch keys off."""
    plain = read_toml(path, FIELD)
    try:
        keys = from_plain(plain, _KeyFile).key
    except InvalidArgument as error:
        raise wrong(path, str(error), FIELD, error) from error
    if not keys:
        raise wrong(path, "holds no key", FIELD)
    _distinct(keys, path)
    return keys


def keys_of_variable(environment: Mapping[str, str]) -> list[ApiKey]:
    """Return the plain keys of the variable, named after it."""
    texts = [text.strip() for text in environment.get(VARIABLE, "").split(",") if text.strip()]
    try:
        hashes = [hash_of(text) for text in texts]
    except InvalidArgument as error:
        raise InvalidArgument(f"{VARIABLE}: {error}") from None
    return [ApiKey(name=f"{VARIABLE}.{number}", hash=each) for number, each in enumerate(hashes, 1)]


def _distinct(keys: list[ApiKey], path: Path | None) -> None:
    try:
        check_distinct(keys)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path or VARIABLE}: {error}", field=FIELD if path else "") from None
