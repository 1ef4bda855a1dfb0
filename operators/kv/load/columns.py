"""LoadColumns: the figures of all ranks in one column per number.

A selection reads them for hundreds of ranks, and a column is taken in one step.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, floor

from attrs import define, field

from ..numbers import Groups
from .field import Chosen, Holders, Load, LoadField
from .ranks import RankLoads

LATELY_S = 10.0
"""The blocks a rank held lately are a mean over about so long."""
_IDLE: Load = (0, 0, 0, 0)


@define(eq=False)
class LoadColumns:
    """Each figure by number. Number 0 stays idle and stands for ranks without an account."""

    prefill_tokens: list[int] = field(factory=lambda: [0], init=False)
    decode_blocks: list[int] = field(factory=lambda: [0], init=False)
    requests: list[int] = field(factory=lambda: [0], init=False)
    blocks_lately: list[int] = field(factory=lambda: [0], init=False)
    """Zeros until they are shown, see `note_blocks_lately`."""
    _means: list[float] = field(factory=lambda: [0.0], init=False)
    """The same before rounding, shown or not."""
    _noted_s: float = field(default=0.0, init=False)
    _holders: Holders | None = field(default=None, init=False)
    """Made by the first search: where there are few ranks nothing searches."""

    def open(self, number: int) -> None:
        """Begin with an idle rank under this number."""
        for column in (self.prefill_tokens, self.decode_blocks, self.requests, self.blocks_lately):
            column += [0] * (number + 1 - len(column))
        self._means += [0.0] * (number + 1 - len(self._means))
        if self._holders is not None:
            self._holders.add(_IDLE, 1 << number)

    def close(self, number: int) -> None:
        """Forget the rank with this number; it stands for none then."""
        self._write(number, _IDLE)
        self._means[number] = 0.0
        if self._holders is not None:
            self._holders.remove(_IDLE, 1 << number)

    def write(self, number: int, tokens: int, blocks: int, requests: int) -> None:
        """Write the figures of one rank."""
        self._write(number, (tokens, blocks, requests, self.blocks_lately[number]))

    def note_blocks_lately(self, numbers: Iterable[int], now_s: float, *, shown: bool) -> None:
        """Let the blocks that each rank holds now go into the mean of those it held lately.

        The means show in the loads, in whole blocks, where `shown`, from now to the next call.
        """
        keep, means = exp((self._noted_s - now_s) / LATELY_S), self._means
        self._noted_s = now_s
        for number in numbers:
            held = self.decode_blocks[number]
            mean = means[number] = held + (means[number] - held) * keep
            if self.blocks_lately[number] != (lately := floor(mean + 0.5) if shown else 0):
                self._write(number, (self.prefill_tokens[number], held, self.requests[number], lately))

    def loads(self, chosen: Chosen, blocks: int, shared: Groups) -> RankLoads:
        """Return the figures of this moment, those of the chosen ranks only."""
        columns = self.prefill_tokens, self.decode_blocks, self.requests, self.blocks_lately
        return chosen.loads(blocks, shared, *columns)

    def field(self, chosen: Chosen, blocks: int, shared: Groups) -> LoadField:
        """Return the figures of this moment, which later bookings do not change."""
        return LoadField(
            chosen,
            blocks,
            shared,
            self.prefill_tokens.copy(),
            self.decode_blocks.copy(),
            self.requests.copy(),
            self.blocks_lately.copy(),
        )

    def holders(self, numbers: Iterable[int]) -> Holders:
        """Return which ranks have which load now; `numbers` are all there are."""
        if (holders := self._holders) is None:
            holders = self._holders = Holders()
            for number in numbers:
                holders.add(self._load_of(number), 1 << number)
        return holders

    def _write(self, number: int, load: Load) -> None:
        if (holders := self._holders) is not None:
            before = self._load_of(number)
            if before != load:
                holders.remove(before, 1 << number)
                holders.add(load, 1 << number)
        self.prefill_tokens[number], self.decode_blocks[number], self.requests[number], lately = load
        self.blocks_lately[number] = lately

    def _load_of(self, number: int) -> Load:
        held = self.decode_blocks[number]
        return self.prefill_tokens[number], held, self.requests[number], self.blocks_lately[number]
