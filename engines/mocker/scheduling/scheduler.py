"""Scheduler: which sequences advance in a pass, how long it takes, and what they say."""

from __future__ import annotations

from itertools import chain

from pipeline import ContractViolation

from ..timing import PolynomialTiming, StepTime
from .blocks import BlockPool
from .policies import UNBOUNDED, Burst, Policy, VllmPolicy
from .sequence import NEVER, Sequence, SequenceState
from .step import Queue, StepPlan, StepResult

__all__ = ["Scheduler", "StepResult"]


class Scheduler:
    """Runs sequences pass by pass over one pool of blocks, as one rank of an engine does.

    ::

        submit ──► waiting ──admitted──► running ──► finished (with `holds_blocks`: held, until release)
                      ▲                   │   ▲
                      └────pre-empted─────┘   │
        reserve ──► reserved ──activate──► ready

    A pass gives each running sequence, in order of admission, the tokens it lacks; then, unless somebody was
    pre-empted, it admits from the head of the waiting. Who is computed to the last known token says one more. `cancel`
    takes a sequence out of any state. Nothing here waits, and nothing may be called from within `on_event`.

    `max_seqs` and `max_batched_tokens`: None is no limit. A `prefill` worker is charged nothing for tokens, a `decode`
    worker nothing for prompts but those it is told to pay for, which nobody else computes. What a model of time raises
    comes through; all that is left to do then is to cancel.

    Source: dynamo lib/mocker/src/scheduler/vllm/core.rs. Other than there, tokens of a burst get their blocks in the
    pass that computes them, as single ones do; a prompt that fits no pass is rejected, not kept waiting forever; and
    who runs on blocks filled elsewhere need not queue behind those who wait for blocks.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        policy: Policy | None = None,
        time: StepTime | None = None,
        worker_type: str = "aggregated",
        max_seqs: int | None = None,
        max_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        prefix_caching: bool = True,
        chunked_prefill: bool = True,
        burst: Burst | None = None,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.preemptions = 0
        self._policy = VllmPolicy() if policy is None else policy
        self._time = StepTime(PolynomialTiming()) if time is None else time
        self._charges_prompts = worker_type != "decode"
        self._charges_tokens = worker_type != "prefill"
        self._max_seqs = UNBOUNDED if max_seqs is None else max_seqs
        self._max_tokens = UNBOUNDED if max_batched_tokens is None else max_batched_tokens
        self._caching = prefix_caching
        self._chunked = chunked_prefill
        self._burst = burst if self._charges_tokens else None
        self._running: list[Sequence] = []
        self._queue = Queue(
            pool,
            self._policy,
            block_size=block_size,
            max_model_len=UNBOUNDED if max_model_len is None else max_model_len,
            prefix_caching=prefix_caching,
        )

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The running sequences in order of admission."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """The sequences that wait for a pass, the next one first."""
        return (*self._queue.ready, *self._queue.waiting)

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        """Sequences taken on and not running, those included whose prompt is computed elsewhere."""
        return len(self._queue)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing for a pass to do."""
        return not (self._running or self._queue.waiting or self._queue.ready)

    def rejects(self, sequence: Sequence) -> bool:
        """Whether the sequence could never be served here."""
        return self._queue.end_of(sequence) is None

    def submit(self, sequence: Sequence, *, holds_blocks: bool = False, pays_prompt: bool = False) -> None:
        """Takes a new sequence on; with `holds_blocks` it keeps its blocks when it is finished.

        `pays_prompt` is for a decode worker: everywhere else a prompt takes time anyway.
        An output that goes beyond what the model or the cache can hold is cut here.
        """
        self._queue.begin(sequence, SequenceState.WAITING)
        sequence.holds_blocks = holds_blocks
        sequence.pays_prompt = pays_prompt or self._charges_prompts
        self._queue.waiting.append(sequence)

    def reserve(self, sequence: Sequence) -> bool:
        """Takes blocks for a new sequence's prompt, which somebody else computes; False if there is no room now.

        Its `cached_tokens` are what need not be sent, for it is here already.
        """
        if self.rejects(sequence):
            return False
        end = sequence.end
        self._queue.begin(sequence, SequenceState.RESERVED)
        sequence.pays_prompt = self._charges_prompts  # computed here after all, if it is pre-empted
        found, shared = self._queue.match(sequence, sequence.prompt_tokens // self.block_size)
        if not self._queue.fits(sequence, shared, self._running):
            sequence.stage, sequence.end = SequenceState.NEW, end
            return False
        sequence.adopt(self.pool, found)
        if not sequence.allocate(self.pool, sequence.prompt_tokens):
            raise ContractViolation("a policy admitted a prompt that does not fit")
        sequence.cached_tokens = sequence.reused_tokens = len(found) * self.block_size
        self._queue.reserved[sequence] = None
        return True

    def activate(self, sequence: Sequence) -> None:
        """The prompt of a reserved sequence has come: the next pass with room for it makes it say its next token."""
        if sequence.stage is not SequenceState.RESERVED:
            raise ContractViolation(f"a sequence that is {sequence.stage.name.lower()} has no reservation")
        self._queue.remove(sequence)
        sequence.computed = sequence.prompt_tokens
        self._publish(sequence)
        sequence.stage = SequenceState.WAITING
        self._queue.ready.append(sequence)

    def release(self, sequence: Sequence) -> None:
        """Gives back the blocks of a finished sequence that holds them; nothing for any other."""
        if sequence.stage is SequenceState.HELD:
            self._end(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and gives back what it has; nothing if it has ended."""
        if sequence.stage is SequenceState.RUNNING:
            self._running.remove(sequence)
        elif sequence.stage in (SequenceState.WAITING, SequenceState.RESERVED):
            self._queue.remove(sequence)
        self._end(sequence)

    def run_step(self) -> StepResult:
        """Schedules, computes and says what one forward pass does. Returns it, with the time it takes."""
        done = StepResult()
        plan = StepPlan(self._max_tokens, self._policy.prefill_tokens)
        if self._policy.prefill_first:
            self._plan_prompts_first(plan, done)
        else:
            self._advance_running(plan, done)
            if not done.preempted:
                self._admit(plan, done)
        done.scheduled_tokens = self._max_tokens - plan.budget
        if plan.paying:
            done.duration_ms = self._time.prefill_ms(plan.paying, plan.prompt_tokens, plan.cached_tokens)
        self._emit(done)
        self._policy.after_step(bool(done.preempted))
        return done

    def _plan_prompts_first(self, plan: StepPlan, done: StepResult) -> None:
        for sequence in self.running:
            if sequence.computed < sequence.prompt_tokens and sequence.stage is SequenceState.RUNNING:
                self._advance(sequence, plan, done)
        if not done.preempted:
            self._admit(plan, done)
        if not plan.batch:
            self._advance_running(plan, done)

    def _advance_running(self, plan: StepPlan, done: StepResult) -> None:
        """Gives each running sequence the tokens it lacks. The first case is nearly all there is to do, ever."""
        for sequence in self.running:
            if plan.budget <= 0:
                break
            length = sequence.length
            if sequence.computed == length - 1 and length <= sequence.room and length > sequence.prompt_tokens:
                plan.budget -= 1
                sequence.computed = length
                if length >= sequence.next_full:
                    self._publish(sequence)
            elif sequence.stage is SequenceState.RUNNING:
                self._advance(sequence, plan, done)

    def _advance(self, sequence: Sequence, plan: StepPlan, done: StepResult) -> None:
        """Gives a running sequence tokens and blocks for them; pre-empts where there are no blocks, maybe itself."""
        tokens = self._allowance(sequence, sequence.computed, plan)
        if not tokens:
            return
        while not sequence.allocate(self.pool, sequence.computed + tokens):
            if self._preempt(plan, done) is sequence:
                return
        self._compute(sequence, tokens, plan)

    def _allowance(self, sequence: Sequence, before: int, plan: StepPlan) -> int:
        """How many tokens a sequence with so many computed gets in this pass."""
        remaining = sequence.length - before
        if before >= sequence.prompt_tokens:
            return min(remaining, plan.budget)
        if not self._chunked and remaining > plan.budget:
            return 0
        return min(self._policy.part(remaining, plan.prefill_left), plan.budget)

    def _compute(self, sequence: Sequence, tokens: int, plan: StepPlan) -> None:
        plan.add(sequence, sequence.computed, tokens)
        sequence.computed += tokens
        if sequence.computed >= sequence.next_full:
            self._publish(sequence)

    def _publish(self, sequence: Sequence) -> None:
        if self._caching:
            sequence.publish(self.pool)
        else:
            sequence.next_full = NEVER

    def _preempt(self, plan: StepPlan, done: StepResult) -> Sequence:
        victim = self._policy.victim(self._running)
        if victim is None:
            raise ContractViolation("a sequence lacks a block that its admission promised")
        self._running.remove(victim)
        plan.take_back(victim)
        victim.reset(self.pool)
        victim.stage = SequenceState.WAITING
        self._queue.waiting.appendleft(victim)
        self.preemptions += 1
        done.preempted.append(victim)
        return victim

    def _admit(self, plan: StepPlan, done: StepResult) -> None:
        """Lets sequences run from the heads of the queues, as long as the next one can."""
        queue, room = self._queue, self._max_seqs - len(self._running)
        while queue.ready and room > 0:
            sequence = queue.ready.popleft()
            plan.add(sequence, sequence.computed, 0)
            self._start(sequence, done, first=True)
            room -= 1
        if not queue.waiting or room <= 0:
            return
        queue.order()
        while queue.waiting and room > 0:
            sequence = queue.waiting[0]
            if self.rejects(sequence):
                self._reject_head(done)
            elif self._admit_head(sequence, plan, done):
                room -= 1
            elif self._running or not self._is_too_long(sequence):
                break
            else:
                self._reject_head(done)

    def _admit_head(self, sequence: Sequence, plan: StepPlan, done: StepResult) -> bool:
        """Lets the head of the waiting run, if there are blocks and tokens for it."""
        found, shared = self._queue.match(sequence, sequence.reusable_blocks())
        if not self._queue.fits(sequence, shared, self._running):
            return False
        before = len(found) * self.block_size
        tokens = self._allowance(sequence, before, plan)
        if not tokens and before < sequence.length:
            return False
        self._queue.waiting.popleft()
        sequence.adopt(self.pool, found)
        sequence.computed = before
        if not sequence.allocate(self.pool, before + tokens):
            raise ContractViolation("a policy admitted a prompt that does not fit")
        self._compute(sequence, tokens, plan)
        sequence.reused_tokens += before
        first = sequence.cached_tokens is None
        if first:
            sequence.cached_tokens = before
        self._start(sequence, done, first=first)
        return True

    def _start(self, sequence: Sequence, done: StepResult, *, first: bool) -> None:
        sequence.stage = SequenceState.RUNNING
        self._running.append(sequence)
        if first:
            done.admitted.append(sequence)

    def _reject_head(self, done: StepResult) -> None:
        sequence = self._queue.waiting.popleft()
        self._end(sequence)
        done.rejected.append(sequence)

    def _is_too_long(self, sequence: Sequence) -> bool:
        """Whether not even a whole pass can begin with what the cache lacks of the sequence now."""
        found, _ = self._queue.match(sequence, sequence.reusable_blocks())
        before = len(found) * self.block_size
        plan = StepPlan(self._max_tokens, self._policy.prefill_tokens)
        return before < sequence.length and not self._allowance(sequence, before, plan)

    def _emit(self, done: StepResult) -> None:
        """Lets each sequence that is computed say its next token, and adds the time that takes."""
        ready = self._ready_to_emit(done)
        emitted, finished, burst = done.emitted, done.finished, self._burst
        for sequence in ready:
            if burst is not None:
                if sequence.generate(burst.draw(sequence.end - sequence.length)):
                    emitted.append(sequence)
            else:
                # What `generate` does, without the call.
                sequence.length = length = sequence.length + 1
                if length > sequence.emitted_length:
                    sequence.emitted_length = length
                    sequence.new_tokens = 1
                    emitted.append(sequence)
            if sequence.length == sequence.end:
                finished.append(sequence)
        if finished or done.completed_empty:
            self._let_go(done)

    def _ready_to_emit(self, done: StepResult) -> list[Sequence]:
        """Who says a token; the time of it is added, and who has none to say is noted."""
        ready, context_tokens = [], 0
        for sequence in self._running:
            length = sequence.length
            if sequence.computed != length:
                continue
            if length < sequence.end:
                ready.append(sequence)
                context_tokens += length
            else:
                done.completed_empty.append(sequence)
        if self._charges_tokens:
            pool, block_size = self.pool, self.block_size
            done.duration_ms += self._time.decode_ms(
                len(ready), pool.active * block_size, pool.capacity * block_size, context_tokens
            )
        return ready

    def _let_go(self, done: StepResult) -> None:
        for sequence in chain(done.completed_empty, done.finished):
            if sequence.holds_blocks:
                sequence.stage = SequenceState.HELD
            else:
                self._end(sequence)
        self._running = [sequence for sequence in self._running if sequence.stage is SequenceState.RUNNING]

    def _end(self, sequence: Sequence) -> None:
        sequence.free(self.pool)
        sequence.stage = SequenceState.ENDED
