"""Scheduler: which sequences advance in a step, how long the step takes, and which tokens come out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from pipeline import ContractViolation

from ...block_pool import BlockPool
from ..timing import PolynomialTiming, StepTime
from . import uniform
from .policies import UNBOUNDED, Burst, Policy, VllmPolicy
from .sequence import NEVER, Sequence, SequenceState
from .step import ROLES, Queue, Role, StepPlan, StepResult


class Scheduler:
    """Runs sequences step by step over one pool of blocks, as one rank of an engine does.

    ::

        submit ──► waiting ──admitted──► running ──► finished (with `holds_blocks`: held, until release)
                      ▲                   │   ▲
                      └────preempted──────┘   │
        reserve ──► reserved ──activate──► ready

    A step gives each running sequence, in order of admission, its missing tokens; then, unless a sequence was
    preempted, it admits from the head of the queue. A sequence whose known tokens are all computed generates one more.
    `cancel` takes a sequence out of any state. Nothing here waits, and nothing may be called from within `on_event`.

    `max_seqs` and `max_batched_tokens` have no limit if None. `role` decides what takes time. What a model of time
    raises goes to the caller, who can then only cancel.

    Source: dynamo lib/mocker/src/scheduler/vllm/core.rs. Other than there, tokens of a burst get their blocks in the
    step that computes them, as single ones do; a prompt that fits no step is rejected instead of waiting for ever; and
    a sequence with blocks filled elsewhere does not queue behind those that wait for blocks.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        policy: Policy | None = None,
        time: StepTime | None = None,
        role: Role = ROLES["aggregated"],
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
        self._role = role
        self._max_seqs = UNBOUNDED if max_seqs is None else max_seqs
        self._max_tokens = UNBOUNDED if max_batched_tokens is None else max_batched_tokens
        self._caching = prefix_caching
        self._chunked = chunked_prefill
        self._burst = burst if role.charges_tokens else None
        self._observes_steps = type(self._policy).after_step is not Policy.after_step
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
        """The sequences that wait for a step, the next one first."""
        return (*self._queue.ready, *self._queue.waiting)

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        """Sequences accepted and not running, including those whose prompt is computed elsewhere."""
        return len(self._queue)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing for a step to do."""
        return not (self._running or self._queue.waiting or self._queue.ready)

    def rejects(self, sequence: Sequence) -> bool:
        """Return whether the sequence can never be served here."""
        return self._queue.end_of(sequence) is None

    def submit(self, sequence: Sequence, *, holds_blocks: bool = False, pays_prompt: bool = False) -> None:
        """Queue a new sequence; with `holds_blocks` it keeps its blocks when it is finished.

        `pays_prompt` charges time for its prompt where the role does not. An output beyond what the model or the cache
        can hold is cut here.
        """
        self._queue.begin(sequence, SequenceState.WAITING)
        sequence.holds_blocks = holds_blocks
        sequence.pays_prompt = pays_prompt or self._role.charges_prompts
        self._queue.waiting.append(sequence)

    def reserve(self, sequence: Sequence) -> bool:
        """Take blocks for a new sequence's prompt, which a prefill worker computes; return False without room for it.

        Its `cached_tokens` need not be transferred: they are in the cache here.
        """
        if self.rejects(sequence):
            return False
        end = sequence.end
        self._queue.begin(sequence, SequenceState.RESERVED)
        sequence.pays_prompt = self._role.charges_prompts  # computed here after all, if it is preempted
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
        """Let a reserved sequence run, for its prompt has arrived: the next step with room generates its next token."""
        if sequence.stage is not SequenceState.RESERVED:
            raise ContractViolation(f"a sequence that is {sequence.stage.name.lower()} has no reservation")
        self._queue.remove(sequence)
        sequence.computed = sequence.prompt_tokens
        self._publish(sequence)
        sequence.stage = SequenceState.WAITING
        self._queue.ready.append(sequence)

    def release(self, sequence: Sequence) -> None:
        """Release the blocks of a finished sequence that holds them; does nothing for any other."""
        if sequence.stage is SequenceState.HELD:
            self._end(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Remove a sequence in any state and release its blocks; does nothing if it has ended."""
        if sequence.stage is SequenceState.RUNNING:
            self._running.remove(sequence)
        elif sequence.stage in (SequenceState.WAITING, SequenceState.RESERVED):
            self._queue.remove(sequence)
        self._end(sequence)

    def run_step(self) -> StepResult:
        """Schedule and compute one step; return its outcome and the time it takes."""
        done = StepResult()
        plan = StepPlan(self._max_tokens, self._policy.prefill_tokens)
        if self._policy.prefill_first:
            self._plan_prompts_first(plan, done)
        else:
            self._advance_running(plan, done)
            if not done.preempted and (self._queue.waiting or self._queue.ready):
                self._admit(plan, done)
        done.scheduled_tokens = self._max_tokens - plan.budget
        if plan.paying:
            done.paid_tokens = plan.prompt_tokens - plan.cached_tokens
            done.duration_ms = self._time.prefill_ms(plan.paying, plan.prompt_tokens, plan.cached_tokens)
        self._emit(done)
        self._policy.after_step(bool(done.preempted))
        return done

    def uniform_steps(self) -> int:
        """Return how many of the next steps do nothing but give each running sequence one new token; see `uniform`."""
        if self._queue.waiting or self._queue.ready or len(self._running) > self._max_tokens:
            return 0
        if self._burst is not None or not self._role.charges_tokens:
            return 0
        return uniform.steps_until_end(self._running)

    def uniform_times_ms(self, steps: int) -> Iterable[float] | None:
        """Return the time of each of that many uniform steps, or of fewer, as far as there are blocks.

        None if the model of time has to be called at each step.
        """
        return uniform.times_ms(self._running, self.pool, self.block_size, self._time, steps)

    def steps_to_border(self) -> int:
        """Return how many uniform steps come before the next one in which a sequence takes or fills a block."""
        return uniform.steps_to_border(self._running)

    def advance(self, steps: int, done: Callable[[int], object] | None = None) -> None:
        """Do that many uniform steps. `done` is called after each run of them with the same blocks: with how many."""
        uniform.advance(self._running, self.pool, steps, self._publish, done)
        if self._observes_steps:
            for _ in range(steps):
                self._policy.after_step(False)

    def _plan_prompts_first(self, plan: StepPlan, done: StepResult) -> None:
        for sequence in tuple(self._running):
            if sequence.computed < sequence.prompt_tokens and sequence.stage is SequenceState.RUNNING:
                self._advance(sequence, plan, done)
        if not done.preempted:
            self._admit(plan, done)
        if not plan.batch:
            self._advance_running(plan, done)

    def _advance_running(self, plan: StepPlan, done: StepResult) -> None:
        """Give each running sequence its missing tokens. The first case is nearly always the one."""
        for sequence in tuple(self._running):
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
        """Give a running sequence tokens and blocks for them; without blocks preempt a sequence, maybe this one."""
        tokens = self._allowance(sequence, sequence.computed, plan)
        if not tokens:
            return
        while not sequence.allocate(self.pool, sequence.computed + tokens):
            if self._preempt(plan, done) is sequence:
                return
        self._compute(sequence, tokens, plan)

    def _allowance(self, sequence: Sequence, before: int, plan: StepPlan) -> int:
        """Return how many tokens a sequence with that many computed ones gets in this step."""
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
        """Start sequences from the heads of the queues, as long as the next one fits."""
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
        """Start the head of the queue if there are blocks and tokens for it; return whether it runs."""
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
        """Return whether the part of the sequence that is not cached exceeds even an empty step."""
        found, _ = self._queue.match(sequence, sequence.reusable_blocks())
        before = len(found) * self.block_size
        plan = StepPlan(self._max_tokens, self._policy.prefill_tokens)
        return before < sequence.length and not self._allowance(sequence, before, plan)

    def _emit(self, done: StepResult) -> None:
        """Generate the next token of each sequence that is computed, and add the time of that."""
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
        """Return the sequences that generate a token; add the time, and record those without a token to generate."""
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
        if self._role.charges_tokens:
            pool, block_size = self.pool, self.block_size
            done.read_blocks = pool.active if ready else None
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
