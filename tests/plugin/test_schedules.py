"""Random schedules through vLLM's block manager and our impl, against a dense oracle.

A schedule is what a scheduler and users can do: requests arrive, share prefixes, are cut into
chunks, guess tokens and are wrong, are preempted and come back, end, and leave their blocks to
others. After every step each new output must be what dense attention by the rule says of the
request's own tokens; free memory is poisoned, so that reading another's shows.

`make fuzz MINUTES=60` searches longer and elsewhere than CI, which runs the same schedules each
time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.fp8 import at_scale_one
from support.one_layer import (
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    MAX_REQUESTS,
    MAX_TOKENS,
    UNIT_SIZE,
    OneLayer,
    Scheduled,
    Setup,
)

from kvq_kernels import Format, reference
from kvq_kernels.fp8 import is_fp8
from kvq_vllm import plugin

MINUTES = float(os.environ.get("KVQ_FUZZ_MINUTES", "0"))

SETUPS = {
    "int4": Setup("kvq-int4"),
    "int4, reference kernels": Setup("kvq-int4", kernels="reference"),
    "int8, two units per page": Setup("kvq-int8", block_size=128),
    "k8v4, window of 80": Setup("kvq-k8v4", window=80),
    "int4, no drafts": Setup("kvq-int4", drafts=0),
    "fp8": Setup("kvq-fp8"),
}
TOLERANCE = {"kvq_kernels.cpu": 2e-3}
"""By kernels, relative to the largest output: these round queries to 16 bits."""
PADDING = 2
"""Rows behind the step's tokens, as graphs have them."""
POISONS = [0xFF, 0x7B]
"""NaN in every float type; and large finite numbers, which no NaN check removes."""


class Text:
    """Content of positions: queries, keys and values as a function of all tokens up to there.

    A position's row depends on the chain of tokens before it, as in a model: requests have rows
    in common exactly as far as their tokens are the same.
    """

    ROWS = 1 << 14

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def rows(heads: int) -> torch.Tensor:
            return torch.randn(self.ROWS, heads, HEAD_SIZE, generator=generator)

        self.query, self.key, self.value = rows(HEADS), rows(KV_HEADS), rows(KV_HEADS)
        self.key[..., 1] *= 6  # an outlier channel

    @staticmethod
    def extend(chain: int, token: int) -> int:
        """Return the chain with one more token."""
        return hash((chain, token))

    @classmethod
    def chains(cls, tokens: list[int]) -> list[int]:
        chains, chain = [], 0
        for token in tokens:
            chain = cls.extend(chain, token)
            chains.append(chain)
        return chains

    @classmethod
    def rows_of(cls, chains: list[int]) -> torch.Tensor:
        return torch.tensor([chain % cls.ROWS for chain in chains])


TEXT = Text()


class Oracle:
    """Dense attention by the rule over a request's own positions."""

    def __init__(self, setup: Setup, params: Any) -> None:
        self.params = params
        self._sealed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        if is_fp8(setup.cache_dtype):
            layer = at_scale_one(setup.cache_dtype, HEAD_SIZE)
            self.fmt = None
            self.key, self.value = layer.fake_quantise(TEXT.key, TEXT.value)
        else:
            self.fmt = Format.create(setup.cache_dtype, HEAD_SIZE, UNIT_SIZE, 32)
            self.key, self.value = TEXT.key, TEXT.value

    def outputs(self, chains: list[int], start: int) -> torch.Tensor:
        """Return what queries at positions [start, end) see, ``[end - start, heads, size]``."""
        if self.fmt is None:
            return self._attend(chains, start, len(chains), sealed=0)
        parts = []
        for unit in range(start // UNIT_SIZE * UNIT_SIZE, len(chains), UNIT_SIZE):
            end = min(len(chains), unit + UNIT_SIZE)
            parts.append(self._attend(chains[:end], max(start, unit), end, sealed=unit))
        return torch.cat(parts)

    def _attend(self, chains: list[int], start: int, end: int, sealed: int) -> torch.Tensor:
        units = [self._unit(chains[u : u + UNIT_SIZE], u) for u in range(0, sealed, UNIT_SIZE)]
        rows = Text.rows_of(chains[sealed:end])
        key = torch.cat([*(key for key, _ in units), self.key[rows]])
        value = torch.cat([*(value for _, value in units), self.value[rows]])
        query = TEXT.query[Text.rows_of(chains[start:end])]
        return reference.attention(query, key, value, self.params, start, 0)

    def _unit(self, chains: list[int], start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantise and dequantise a unit; its last chain names all it depends on."""
        if chains[-1] not in self._sealed:
            rows = Text.rows_of(chains)
            key, value = (x[rows].transpose(0, 1) for x in (TEXT.key, TEXT.value))
            record = reference.pack_records(key, value, self.fmt, first=start == 0)
            key, value = reference.unpack_records(record, self.fmt)
            self._sealed[chains[-1]] = key.transpose(0, 1), value.transpose(0, 1)
        return self._sealed[chains[-1]]


class Work(NamedTuple):
    """What a request may do in a step.

    Attributes:
        tokens: at most so many of a prompt; 0 to wait.
        drafts: tokens to guess, once it generates.
        right: how many of them are right.

    """

    tokens: int
    drafts: int
    right: int


ALL = Work(MAX_TOKENS, 0, 0)

near_units = st.integers(1, 4).flatmap(
    lambda unit: st.integers(-4, 4).map(lambda offset: unit * UNIT_SIZE + offset)
)
lengths = near_units | st.integers(1, MAX_TOKENS - 1)
works = st.lists(
    st.builds(
        Work,
        st.just(MAX_TOKENS) | near_units | st.integers(0, 2 * UNIT_SIZE),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    max_size=MAX_REQUESTS,
)
some_request = st.integers(0, MAX_REQUESTS - 1)


class Schedule(RuleBasedStateMachine):
    """What happens to the requests of one engine."""

    def __init__(self, engine: OneLayer, oracle: Oracle) -> None:
        super().__init__()
        self.engine, self.oracle = engine, oracle
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.arrived = 0
        # Per request: all tokens that it will ever have, and their chains.
        self.futures: dict[str, list[int]] = {}
        self.chains: dict[str, list[int]] = {}

    @initialize(poison=st.sampled_from(POISONS))
    def start(self, poison: int) -> None:
        self.engine.reset(poison)

    # --- what users do -------------------------------------------------------------------

    @precondition(lambda self: len(self.running) + len(self.waiting) < MAX_REQUESTS)
    @rule(text=st.integers(0, 1), shared=lengths, prompt=lengths)
    def arrive(self, text: int, shared: int, prompt: int) -> None:
        """A request comes: `shared` tokens of one of two texts, then tokens of its own."""
        self.arrived += 1
        request_id = str(self.arrived)
        own = 2 + self.arrived
        future = [text] * shared + [own] * (MAX_TOKENS - shared)
        self.futures[request_id], self.chains[request_id] = future, Text.chains(future)
        self.waiting.append(self.engine.new_request(request_id, future[:prompt]))

    @precondition(lambda self: self.running)
    @rule(which=some_request)
    def end(self, which: int) -> None:
        """A request ends or is aborted, wherever it is."""
        request = self.running.pop(which % len(self.running))
        self.free(request)

    # --- what a scheduler does -----------------------------------------------------------

    @precondition(lambda self: self.running or self.waiting)
    @rule(work=works, admitted=st.integers(0, MAX_REQUESTS))
    def step(self, work: list[Work], admitted: int) -> None:
        """Run a step; `work` is of the running requests, then of those admitted."""
        self.run_step(work, admitted)

    @precondition(lambda self: self.running)
    @rule(steps=st.integers(2, UNIT_SIZE + 6), drafts=st.integers(0, 3), right=st.integers(0, 3))
    def decode(self, steps: int, drafts: int, right: int) -> None:
        """All requests generate for some steps; drafts are right up to `right` in turns."""
        for i in range(steps):
            work = Work(MAX_TOKENS, drafts, (i + right) % (right + 1))
            self.run_step([work] * len(self.running), admitted=0)

    @precondition(lambda self: self.running)
    @rule(what=st.sampled_from(["preempt", "reset the prefix cache", "dummy step"]))
    def disturb(self, what: str) -> None:
        {"preempt": self.preempt, "dummy step": self.dummy_step}.get(what, self.forget)()

    def preempt(self) -> None:
        """The last request that came loses its blocks."""
        self.preempt_request(self.running.pop())

    def forget(self) -> None:
        """Forget all prefixes; running requests lose their blocks."""
        while self.running:
            self.preempt()
        assert self.engine.manager.reset_prefix_cache()
        self.engine.poison_free_blocks()

    def dummy_step(self) -> None:
        """vLLM runs a batch for show, over block tables that name blocks in use."""
        before = self.engine.memory.clone()
        batch = [
            Scheduled(request.request_id, torch.tensor([i]), request.num_tokens)
            for i, request in enumerate(self.running)
        ]
        rows = torch.arange(len(batch))
        self.engine.forward(batch, TEXT.query[rows], TEXT.key[rows], TEXT.value[rows], dummy=True)
        assert torch.equal(self.engine.memory, before)

    # --- how -----------------------------------------------------------------------------

    def run_step(self, work: list[Work], admitted: int) -> None:
        """Schedule as vLLM does: running requests first, the last one preempted for blocks."""
        works = iter(work)
        step: list[tuple[Any, int, Work]] = []
        preempted = False
        for request in list(self.running):
            own = next(works, ALL)
            if request not in self.running:
                break
            if count := self.new_tokens(request, own):
                while not self.allocate(request, count):
                    preempted = True
                    victim = self.running.pop()
                    self.preempt_request(victim)
                    if victim is request:
                        break
                else:
                    step.append((request, count, own))
        while self.waiting and admitted and not preempted:
            own, admitted = next(works, ALL), admitted - 1
            request = self.waiting[0]
            blocks, hit, _ = self.engine.manager.get_computed_blocks(request)
            count = min(own.tokens, request.num_tokens - hit)
            if count == 0 or not self.allocate(request, count, hit, blocks):
                break
            request.num_computed_tokens = hit
            self.running.append(self.waiting.pop(0))
            step.append((request, count, own))
        self.engine.poison_free_blocks()
        if step:
            self.execute(step)

    def new_tokens(self, request: Any, work: Work) -> int:
        """Tokens that a running request has for a step, guessed ones included."""
        missing = request.num_tokens - request.num_computed_tokens
        if missing > 1:
            return min(work.tokens, missing)
        if not work.tokens:
            return 0
        return min(1 + self.drafts(work), MAX_TOKENS - request.num_computed_tokens)

    def drafts(self, work: Work) -> int:
        return min(work.drafts, self.engine.setup.drafts)

    def allocate(self, request: Any, count: int, hit: int = 0, blocks: Any = None) -> bool:
        new = self.engine.manager.allocate_slots(
            request, count, num_new_computed_tokens=hit, new_computed_blocks=blocks
        )
        if new is None:
            return False
        for group in new.blocks:
            self.engine.poison_blocks(group)
        return True

    def preempt_request(self, request: Any) -> None:
        self.free(request)
        request.num_computed_tokens = 0
        self.waiting.insert(0, request)

    def free(self, request: Any) -> None:
        self.engine.manager.free(request)
        self.engine.poison_free_blocks()

    def execute(self, step: list[tuple[Any, int, Work]]) -> None:
        """Run the impl, compare every new row with the oracle, and accept drafts."""
        step.sort(key=lambda item: item[1] > 1 + self.engine.setup.drafts)
        batch, chains, first_row = [], [], 0
        for request, count, work in step:
            seen = self.seen(request, count, work)
            rows = torch.arange(first_row, first_row + count)
            batch.append(Scheduled(request.request_id, rows, len(seen)))
            chains.append(seen)
            first_row += count
        new = [
            chain
            for seen, share in zip(chains, batch, strict=True)
            for chain in seen[len(seen) - len(share.rows) :]
        ]
        rows = Text.rows_of(new)
        query, key, value = (
            torch.nn.functional.pad(x[rows], (0, 0, 0, 0, 0, PADDING), value=torch.nan)
            for x in (TEXT.query, TEXT.key, TEXT.value)
        )
        output = self.engine.forward(batch, query, key, value)
        tolerance = TOLERANCE.get(self.engine.impl.kernels.__name__, 1e-4)
        for seen, share in zip(chains, batch, strict=True):
            expected = self.oracle.outputs(seen, len(seen) - len(share.rows))
            error = (output[share.rows] - expected).abs().max().item()
            largest = expected.abs().max().item()
            assert error <= tolerance * largest, (
                f"request {share.request_id}, positions {len(seen) - len(share.rows)} to "
                f"{len(seen)}: off by {error:.3g} of {largest:.3g}"
            )
        for request, count, work in step:
            self.finish_step(request, count, work)

    def seen(self, request: Any, count: int, work: Work) -> list[int]:
        """Chains of a request's positions in this step, of wrong drafts in their place."""
        known = self.chains[request.request_id]
        start = request.num_computed_tokens
        right = self.right(request, count, work)
        seen = known[: min(start + count, request.num_tokens + right)]
        while len(seen) < start + count:
            seen.append(Text.extend(seen[-1], -self.arrived))
        return seen

    def right(self, request: Any, count: int, work: Work) -> int:
        """How many drafts of a step turn out right."""
        drafts = request.num_computed_tokens + count - request.num_tokens
        return min(work.right, max(0, drafts))

    def finish_step(self, request: Any, count: int, work: Work) -> None:
        drafts = max(0, request.num_computed_tokens + count - request.num_tokens)
        right = self.right(request, count, work)
        request.num_computed_tokens += count - (drafts - right)
        if request.num_computed_tokens < request.num_tokens + right:
            return  # there is more of the prompt
        end = min(MAX_TOKENS, request.num_tokens + right + 1)
        future = self.futures[request.request_id]
        request.append_output_token_ids(future[request.num_tokens : end])
        if request.num_computed_tokens == MAX_TOKENS:
            self.running.remove(request)
            self.free(request)

    @invariant()
    def nobody_writes_to_the_null_block(self) -> None:
        null_block = self.engine.manager.block_pool.null_block.block_id
        assert (self.engine.memory[null_block] == self.engine.poison).all()

    def teardown(self) -> None:
        """All blocks are free in the end."""
        for request in self.running:
            self.engine.manager.free(request)
        pool = self.engine.manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@cache
def engine(name: str) -> OneLayer:
    plugin.register()
    return OneLayer(SETUPS[name])


def rounds() -> Iterator[settings]:
    """Yield once what CI runs; or other random schedules until the time is over."""
    common = settings(
        deadline=None,
        suppress_health_check=list(HealthCheck),
        stateful_step_count=30,
        phases=[Phase.generate, Phase.shrink],
        database=None,
        print_blob=False,
    )
    if not MINUTES:
        yield settings(common, max_examples=20, derandomize=True)
        return
    end = time.monotonic() + 60 * MINUTES / len(SETUPS)
    while time.monotonic() < end:
        yield settings(common, max_examples=100)


@pytest.mark.parametrize("name", SETUPS)
def test_schedules(name: str) -> None:
    for round_settings in rounds():

        def schedule() -> Schedule:
            layer = engine(name)
            return Schedule(layer, Oracle(layer.setup, layer.impl.params))

        run_state_machine_as_test(schedule, settings=round_settings)
