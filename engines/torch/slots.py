"""Choice: one answer of a request on its way, as the batcher moves it; and what is drawn for it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from attrs import define, field, frozen

from pipeline import PenstockError
from pipeline.protocols import FinishReason

from .order import Order


@frozen
class KvBytes:
    """The KV of a prompt's first `tokens` tokens, in the layout of the cache: see `KvLayout`."""

    tokens: int
    data: bytes


@frozen
class HeldBlocks:
    """The blocks of a computed prompt, held for its hand-over. They are released by `TorchEngine.release`, once."""

    block_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """The tokens whose KV is in the blocks."""


@frozen
class Drawn:
    """A drawn token and, if they are wanted, its log probability, its rank from 1, and the most likely tokens."""

    token_id: int
    logprob: float | None = None
    rank: int | None = None
    top: tuple[tuple[int, float], ...] = ()
    """Id and log probability of the most likely tokens, the most likely first."""


@frozen
class News:
    """What happened to a choice: a token, its end with it, or the error that ended it."""

    choice: Choice
    drawn: Drawn | None = None
    finish: FinishReason | None = None
    stop_id: int | None = None
    """The stop id that ended it."""
    error: PenstockError | None = None


class Stage(Enum):
    """Where a choice is."""

    WAITING = auto()
    RUNNING = auto()
    OVER = auto()


@define(eq=False, kw_only=True)
class Choice:
    """One choice: its tokens, and the blocks that hold the KV of the computed ones."""

    order: Order
    index: int
    """Its number among the choices of the request."""
    receive: Callable[[News], None]
    """Called with each token and with the end."""
    leader: Choice | None = None
    """The choice of the same prompt whose blocks this one waits for."""
    imported: KvBytes | None = None
    """KV of the prompt from elsewhere, until it is written."""
    keeps_blocks: bool = False
    """Whether its blocks are held when it has ended by itself, until it is removed or they are taken."""
    tokens: list[int] = field(init=False)
    """The prompt and what was generated."""
    computed_tokens: int = field(default=0, init=False)
    """So many of them have their KV in the blocks."""
    blocks: list[int] = field(factory=list, init=False)
    names: list[int] = field(factory=list, init=False)
    """Sequence hashes of the whole blocks among its tokens, as far as they are needed."""
    token_hashes: list[int] = field(factory=list, init=False)
    """The same blocks' own hashes."""
    stored_blocks: int = field(default=0, init=False)
    """Blocks that are in the index of the cache."""
    cached_tokens: int | None = field(default=None, init=False)
    """Prompt tokens found in the cache when it began; None: it has not begun."""
    stage: Stage = field(default=Stage.WAITING, init=False)

    def __attrs_post_init__(self) -> None:
        self.tokens = list(self.order.prompt)

    @property
    def pending_tokens(self) -> int:
        """Tokens to compute before the next draw."""
        return len(self.tokens) - self.computed_tokens

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens) - len(self.order.prompt)

    @property
    def is_prompt_computed(self) -> bool:
        return self.computed_tokens >= len(self.order.prompt)
