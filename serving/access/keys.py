"""API keys: random, stored as hashes, each with its models, rates and privileges; from a file, a variable, or both.

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

A key is 256 random bits, so one round of SHA-256 hides it: guessing the key from its hash takes 2^255 tries. The slow
hashes that passwords need would only cost every request milliseconds. That holds for random keys only, so a key that is
too short to be random is refused.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import ClassVar, Literal, get_args

from attrs import field, frozen

from pipeline import InvalidArgument
from pipeline.protocols.field_rules import I32, InvalidRecord
from pipeline.wire import from_plain

from ..settings_file import read_toml, wrong

Privilege = Literal["pin", "priority", "tenant", "admin"]
"""A right that a request needs a key for.

`pin`: name the worker, rank or taints of the request, or get the choice without an answer. `priority`: overtake other
requests. `tenant`: choose the tenant whose cache the request shares. `admin`: read metrics and the state of workers.
"""

ALL_PRIVILEGES: frozenset[Privilege] = frozenset(get_args(Privilege))

SHORTEST_KEY = 32
"""Characters: 128 bits in hexadecimal."""
LONGEST_KEY = 512

FIELD = "api_keys"
"""The option that names the file."""
VARIABLE = "PENSTOCK_API_KEY"
_MISTAKEN = "PENSTOCK_API_KEYS"
_SCHEME = "sha256:"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEY = re.compile(rf"[!-+\--~]{{{SHORTEST_KEY},{LONGEST_KEY}}}")
"""Visible ASCII without the comma, which separates keys in the variable."""


@frozen(kw_only=True)
class ApiKey:
    """One key, as a table `[[key]]` of the file. Raise InvalidRecord for an invalid value."""

    wire_closed: ClassVar[bool] = True

    name: str
    """Stands for the key in logs and counts."""
    hash: str
    """Hash of the key, which itself is not kept."""
    models: list[str] | None = None
    """Models it may use; None: all."""
    requests_per_minute: float | None = None
    """None: any number."""
    tokens_per_minute: float | None = None
    """Of prompts and answers; None: any number."""
    priority: I32 | None = None
    """Priority of its requests that have none, and the highest they may set without the privilege."""
    tenant: str | None = None
    """Keeps the cached prompts of its requests apart from those of other tenants and of keys without one."""
    privileges: list[Privilege] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise InvalidRecord("must be 1 to 64 letters, digits, `_`, `.` or `-`", "name")
        if _HASH.fullmatch(self.hash) is None:  # not shown: it may be a key by mistake
            raise InvalidRecord("must be `sha256:` and 64 hexadecimal digits, as `penstock key` prints it", "hash")
        if self.tenant is not None and _NAME.fullmatch(self.tenant) is None:
            raise InvalidRecord("must be 1 to 64 letters, digits, `_`, `.` or `-`", "tenant")
        for name in ("requests_per_minute", "tokens_per_minute"):
            rate = getattr(self, name)
            if rate is not None and not 1 <= rate <= 1e12:
                raise InvalidRecord("must be between 1 and 1e12", name)

    @property
    def digest(self) -> bytes:
        """The bytes of the hash."""
        return bytes.fromhex(self.hash.removeprefix(_SCHEME))


def new_key() -> str:
    """Return a new key of 256 random bits."""
    return f"penstock-{secrets.token_urlsafe(32)}"


def hash_of(key: str) -> str:
    """Return the hash of a key in the form of the file. Raise InvalidArgument, without the key, for an unsafe key."""
    if _KEY.fullmatch(key) is None:
        text = f"a key must be {SHORTEST_KEY} to {LONGEST_KEY} visible ASCII characters without a comma, made at random"
        raise InvalidArgument(f"{text}: `penstock key new` makes one")
    return f"{_SCHEME}{digest_of(key.encode()).hex()}"


def table_of(name: str, key: str) -> str:
    """Return a key as a table of the file. Raise InvalidArgument, without the key, for a name or key that cannot be."""
    try:
        checked = ApiKey(name=name, hash=hash_of(key))
    except InvalidRecord as error:
        raise InvalidArgument(str(error), field="name") from None
    return f'[[key]]\nname = "{checked.name}"\nhash = "{checked.hash}"'


def digest_of(key: bytes) -> bytes:
    """Return the SHA-256 of a key."""
    return sha256(key).digest()


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
    _check_distinct(keys, path)
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
    _check_distinct(keys, path)
    return keys


def keys_of_variable(environment: Mapping[str, str]) -> list[ApiKey]:
    """Return the plain keys of the variable, named after it."""
    texts = [text.strip() for text in environment.get(VARIABLE, "").split(",") if text.strip()]
    try:
        hashes = [hash_of(text) for text in texts]
    except InvalidArgument as error:
        raise InvalidArgument(f"{VARIABLE}: {error}") from None
    return [ApiKey(name=f"{VARIABLE}.{number}", hash=each) for number, each in enumerate(hashes, 1)]


def _check_distinct(keys: Sequence[ApiKey], path: Path | None) -> None:
    for what in ("name", "hash"):
        counts = Counter(getattr(key, what) for key in keys)
        if twice := [key.name for key in keys if counts[getattr(key, what)] > 1]:
            text = f"{path or VARIABLE}: two keys have the {what} of {twice[0]!r}"
            raise InvalidArgument(text, field=FIELD if path else "")
