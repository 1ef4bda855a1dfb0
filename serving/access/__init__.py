"""Who may use a server: keys and their rates, certificates, trusted proxies. Independent of the HTTP application."""

from .gate import Gate, TrustedProxies, is_loopback
from .key_ring import HeldKey, KeyRing, TooFast
from .keys import ALL_PRIVILEGES, LONGEST_KEY, SHORTEST_KEY, ApiKey, Privilege, all_keys, hash_of, new_key, table_of
from .tls import Tls, tls_of
from .watched_file import WatchedFiles, follow

__all__ = [
    "ALL_PRIVILEGES",
    "LONGEST_KEY",
    "SHORTEST_KEY",
    "ApiKey",
    "Gate",
    "HeldKey",
    "KeyRing",
    "Privilege",
    "Tls",
    "TooFast",
    "TrustedProxies",
    "WatchedFiles",
    "all_keys",
    "follow",
    "hash_of",
    "is_loopback",
    "new_key",
    "table_of",
    "tls_of",
]
