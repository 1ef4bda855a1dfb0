"""API keys: made at random, known by their hash, and what each may do.

A key is 256 random bits, so one round of SHA-256 hides it: guessing the key from its hash takes 2^255 tries, and the
slow hashes that passwords need would cost every request milliseconds for nothing. That holds for random keys only, so a
key that is too short to be one is refused.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from typing import ClassVar, Literal, get_args

from attrs import field, frozen

from pipeline import InvalidArgument
from pipeline.protocols.field_rules import I32, InvalidRecord

Privilege = Literal["pin", "priority", "tenant", "admin"]
"""What a request may do only with a key that has it.

`pin`: name the worker, rank or taints it goes to, and have the choice made without an answer. `priority`: go before
others. `tenant`: choose whose cache it shares. `admin`: read metrics and the state of workers.
"""

ALL_PRIVILEGES: frozenset[Privilege] = frozenset(get_args(Privilege))

SHORTEST_KEY = 32
"""Characters: 128 bits in hexadecimal."""
LONGEST_KEY = 512

_SCHEME = "sha256:"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEY = re.compile(rf"[!-+\--~]{{{SHORTEST_KEY},{LONGEST_KEY}}}")
"""Visible ASCII without the comma, which separates keys in the variable."""


@frozen(kw_only=True)
class ApiKey:
    """One key, as a table `[[key]]` of the file has it; the key itself is not kept, only its hash.

    `name` stands for the key in logs and counts. `models` are those it may use; None: all. `requests_per_minute` and
    `tokens_per_minute` are its rates; None: any. `priority` is that of its requests that name none, and the highest
    they may name without the privilege. `tenant` separates the cached prompts of the key's requests from those of
    keys with another one, or none. Raises InvalidRecord for a value that cannot be.
    """

    wire_closed: ClassVar[bool] = True

    name: str
    hash: str
    models: list[str] | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    priority: I32 | None = None
    tenant: str | None = None
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
    """Return a fresh key of 256 random bits."""
    return f"penstock-{secrets.token_urlsafe(32)}"


def hash_of(key: str) -> str:
    """Return the hash of a key as the file has it. Raise InvalidArgument for a text that is no safe key.

    The error never shows the key.
    """
    if _KEY.fullmatch(key) is None:
        text = f"a key must be {SHORTEST_KEY} to {LONGEST_KEY} visible ASCII characters without a comma, made at random"
        raise InvalidArgument(f"{text}: `penstock key new` makes one")
    return f"{_SCHEME}{digest_of(key.encode()).hex()}"


def digest_of(key: bytes) -> bytes:
    """Return the SHA-256 of a key as it came."""
    return sha256(key).digest()


def check_distinct(keys: Sequence[ApiKey]) -> None:
    """Raise InvalidArgument for two keys of one name or one hash."""
    for what in ("name", "hash"):
        counts = Counter(getattr(key, what) for key in keys)
        if twice := [key.name for key in keys if counts[getattr(key, what)] > 1]:
            raise InvalidArgument(f"two keys have the {what} of {twice[0]!r}")
