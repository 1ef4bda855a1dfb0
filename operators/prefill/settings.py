"""PrefillSettings: what a deployment decides about prefilling elsewhere."""

from __future__ import annotations

from math import isfinite

from attrs import frozen

from pipeline import InvalidArgument


@frozen(kw_only=True)
class PrefillSettings:
    """Raises InvalidArgument, naming the field, for what cannot be.

    `enforce_disagg`: requests are refused, not served without, while nobody can prefill. At most `prefills_max` run at
    once, those that wait in a router's queue included, and each for `prefill_timeout_s`. A prefill that fails when
    decode waits for it already fails the request unless decode shows an item within `decode_patience_s`.
    `drain_timeout_s` is how long the end of the operator waits for those under way.
    """

    enforce_disagg: bool = False
    prefills_max: int = 4096
    prefill_timeout_s: float = 600.0
    decode_patience_s: float = 30.0
    drain_timeout_s: float = 5.0

    def __attrs_post_init__(self) -> None:
        if self.prefills_max < 1:
            raise InvalidArgument(f"must be at least 1, got {self.prefills_max}", field="prefills_max")
        for name in ("prefill_timeout_s", "decode_patience_s", "drain_timeout_s"):
            value: float = getattr(self, name)
            if not isfinite(value) or value < 0:
                raise InvalidArgument(f"must be finite and not negative, got {value}", field=name)
