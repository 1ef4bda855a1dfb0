"""Offers: prompts that were computed here and wait to be fetched, each for as long as its lease.

    add ──► waiting ── lease over ─────────────────────► released
               │ └── fetch ──► ended ──► taken ────────► released
               └───────◄─────────┘ lease not over

Nothing waits here, and time is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from secrets import token_hex

from attrs import define, field

from .slots import HeldBlocks

_ID_BYTES = 16
"""An id is the only thing that a fetch has to show, so it cannot be guessed."""


@define(eq=False)
class Offer:
    """The blocks of one prompt."""

    held: HeldBlocks
    transfer_id: str
    ends_s: float
    """When its lease is over."""
    fetches: int = 0
    """Fetches under way. The blocks stay until they end, also after the lease."""


@define(eq=False)
class Offers:
    """The offers of one prefill worker, by id. Each is released exactly once."""

    release: Callable[[HeldBlocks], object]
    """Called with blocks that are no longer needed."""
    lease_s: float
    """How long an offer waits for its fetch."""
    _offers: dict[str, Offer] = field(factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._offers)

    def add(self, held: HeldBlocks, now_s: float) -> Offer:
        """Return a new offer of the blocks, which belong to it from now on."""
        offer = Offer(held, token_hex(_ID_BYTES), now_s + self.lease_s)
        self._offers[offer.transfer_id] = offer
        return offer

    def fetch(self, transfer_id: str) -> Offer | None:
        """Begin a fetch; None if there is no such offer, or no longer. `ended` ends it."""
        offer = self._offers.get(transfer_id)
        if offer is not None:
            offer.fetches += 1
        return offer

    def ended(self, offer: Offer, now_s: float) -> None:
        """A fetch is over. Unless it was `taken`, the offer waits for another one until its lease is over."""
        offer.fetches -= 1
        self._end(offer, now_s)

    def taken(self, transfer_id: str) -> None:
        """The other side has all of it and has checked it: the offer is over for every other fetch too."""
        if (offer := self._offers.get(transfer_id)) is not None:
            offer.ends_s = float("-inf")
            self._end(offer, offer.ends_s)

    def end_over(self, now_s: float) -> float | None:
        """Release the offers whose lease is over; return when the next one is, None if none waits."""
        for offer in list(self._offers.values()):
            self._end(offer, now_s)
        return min((offer.ends_s for offer in self._offers.values() if not offer.fetches), default=None)

    def clear(self) -> None:
        """Release all, also those that are being fetched: the caller has cut their fetches."""
        offers, self._offers = list(self._offers.values()), {}
        for offer in offers:
            self.release(offer.held)

    def _end(self, offer: Offer, now_s: float) -> None:
        """Release the offer if nothing fetches it and its lease is over."""
        if offer.fetches == 0 and offer.ends_s <= now_s and self._offers.pop(offer.transfer_id, None) is not None:
            self.release(offer.held)
