"""A rank of `soak ep`: its Buffers, its flights, and the checks of every byte that it receives against what every rank can derive."""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from expertwire.cli.bench import ep as bench
from expertwire.cli.bench.paired import Inputs, destinations
from expertwire.cli.soak import ep_plan as plan
from expertwire.cli.soak.ep_plan import BESIDE, MAIN, SMALL, SPARSE, Decode, Exchange, Recall, Shape
from expertwire.ep import Buffer
from expertwire.ep.handle import Handle
from expertwire.ep.low_latency_reference import (
    dequantise,
    pack_ue8m0,
    quantise,
    reference_low_latency_combine,
    reference_low_latency_dispatch,
)
from expertwire.ep.reference import ReferenceReceived, reference_combine, reference_dispatch, reference_keep
from expertwire.errors import ExpertwireError, WorstTokensError
from expertwire.fabric.config import Settings

if TYPE_CHECKING:
    from expertwire.cli.launch import Rank

FAILURES_KEPT = 20
FAILED = "failed: "  # what a progress report begins with that is a failure
TIMEOUT_MS = 30_000  # of every call, unless the environment asks for another
SAY_EVERY_S = 0.5
SCALE_COLUMNS = {"float32": 128, "int32": 512}


@dataclass(frozen=True)
class Setup:
    """What to do; the same on every rank. Ends after `iterations`, or where that is 0 after `seconds`: of all seeds together."""

    mode: str
    node_of: tuple[int, ...]
    provider: str
    seed: int
    seconds: float
    iterations: int
    seeds: int = 1  # `seed` and those after it, one after the other, each with Buffers of its own

    @property
    def ranks(self) -> int:
        """Processes."""
        return len(self.node_of)

    def part(self, number: int) -> Setup:
        """What seed `number`, from 0, does of it: an equal share, of iterations rounded up."""
        return replace(
            self, seed=self.seed + number, seeds=1, seconds=self.seconds / self.seeds, iterations=-(-self.iterations // self.seeds)
        )


@dataclass
class Outcome:
    """What one rank has to tell."""

    iterations: int = 0
    digest: str = ""
    payload_bytes: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)  # the first few, in words
    calls: Counter[str] = field(default_factory=Counter)  # what was done, by kind
    parts: list[Outcome] = field(default_factory=list)  # of several seeds, in order

    def add(self, part: Outcome) -> None:
        """Take in what one of several seeds has given."""
        self.parts.append(part)
        self.iterations += part.iterations
        self.payload_bytes += part.payload_bytes
        self.failed += part.failed
        self.failures = (self.failures + part.failures)[:FAILURES_KEPT]
        self.calls += part.calls
        self.digest = hashlib.blake2b((self.digest + part.digest).encode()).hexdigest()


@dataclass(frozen=True)
class Routed:
    """A dispatch of high throughput that has happened: what a later one by its handle must give. Lists have an entry for each rank."""

    flight: Exchange
    handle: Handle
    kept: list[torch.Tensor]  # bool [T, R]: rows that were received
    weights: torch.Tensor | None  # f32 [N, K], as received
    ids: list[torch.Tensor]
    all_weights: list[torch.Tensor] | None


@dataclass(frozen=True)
class Arrived:
    """Rows of the last dispatch as they lie here, and what every rank had sent."""

    rows: torch.Tensor
    xs: list[torch.Tensor]


def soak(rank: Rank, setup: Setup) -> Outcome:
    """The whole life of a rank."""
    rank.progress("pid", os.getpid(), 0)
    try:
        return _soak(rank, setup)
    except ExpertwireError as error:  # said at once: whoever ends this rank may not wait for the whole of it
        rank.progress(f"{FAILED}{type(error).__name__}: {error}", 0, 0)
        raise


def _soak(rank: Rank, setup: Setup) -> Outcome:
    teller = Teller(rank, setup)
    if setup.seeds == 1:
        return _one_seed(rank, setup, teller)
    outcome = Outcome()
    for number in range(setup.seeds):
        outcome.add(_one_seed(rank, setup.part(number), teller))
    return outcome


def _one_seed(rank: Rank, setup: Setup, teller: Teller) -> Outcome:
    begun = time.monotonic()
    worker = Worker(rank.rank, setup, lambda failure: rank.progress(f"{FAILED}{failure}", 0, 0))
    going = True
    while going:
        worker.iterate()
        going = goes_on(setup, worker.outcome.iterations, time.monotonic() - begun)
        teller.did_one(last=not going)
    return worker.finish()


class Teller:
    """Says how far a rank has come, over all seeds."""

    def __init__(self, rank: Rank, setup: Setup) -> None:
        self._rank, self._by_count = rank, setup.iterations > 0
        self._steps = setup.part(0).iterations * setup.seeds if self._by_count else max(1, round(setup.seconds))
        self._begun, self._said, self._done, self._seeds_left = time.monotonic(), 0.0, 0, setup.seeds

    def did_one(self, *, last: bool) -> None:
        """An iteration is over; `last`: of its seed."""
        self._done += 1
        self._seeds_left -= last
        now, over = time.monotonic(), self._seeds_left == 0
        if self._rank.rank == 0 and (self._done == 1 or now - self._said >= SAY_EVERY_S or over):
            self._said = now
            self._rank.progress("iteration", self._done, 0)
        at = self._done if self._by_count else int(now - self._begun)
        self._rank.progress("iterations" if self._by_count else "seconds", self._steps if over else min(at, self._steps - 1), self._steps)


def goes_on(setup: Setup, done: int, elapsed_s: float) -> bool:
    """Whether another iteration comes; where a clock decides, it is rank 0's. Collective."""
    if setup.iterations:
        return done < setup.iterations
    going = torch.tensor(int(elapsed_s < setup.seconds))
    dist.broadcast(going, 0)
    return bool(going)


def raw(values: torch.Tensor) -> torch.Tensor:
    """The bytes, uint8, in the order of the elements. A dimension of one element may have any stride, so `contiguous` would not do."""
    return values.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether the tensors are the same bytes of the same shape and dtype."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    return torch.equal(raw(got), raw(want))


def made_by(rows: torch.Tensor, rank: int, expert: int = 0) -> torch.Tensor:
    """Stands in for the experts: another value on each rank and expert. bf16."""
    return (rows.float() * (1 + rank / 8) + 0.25 + expert / 4).bfloat16()


class Worker:
    """One rank. All ranks do the same iterations; what each does follows from the plan."""

    def __init__(self, rank: int, setup: Setup, say: Callable[[str], None]) -> None:
        self.rank, self.setup, self.outcome = rank, setup, Outcome()
        self._say = say
        self._hash = hashlib.blake2b()
        self._kept: dict[str, Routed] = {}
        self._iteration = 0
        self.buffers = {name: self._open(name) for name in self._names()}

    def iterate(self) -> None:
        """One iteration."""
        self._iteration = self.outcome.iterations
        step = plan.iteration(self.setup.seed, self._iteration, self.setup.ranks, self.setup.mode)
        running = [self._fly(flight) for flight in step.flights]
        for at in step.order:
            next(running[at], None)
        for flight in running:  # what is behind the last phase
            next(flight, None)
        self.outcome.iterations += 1

    def finish(self) -> Outcome:
        """Close, and what there is to tell."""
        for name, buffer in self.buffers.items():
            counted = buffer.statistics()
            self.outcome.calls[f"operations posted, {name}"] += counted["provider_posted"]
            self.outcome.calls["posts that the provider refused for the moment"] += counted["posts_again"]
            self.outcome.calls["times that work was ready and no slot was free"] += counted["slots_short"]
            buffer.destroy()
        self.outcome.digest = self._hash.hexdigest()
        return self.outcome

    # ---- Buffers

    def _names(self) -> list[str]:
        return {"ht": [MAIN, SMALL], "ll": [MAIN, BESIDE], "both": [MAIN, SMALL, BESIDE]}[self.setup.mode]

    def _open(self, name: str) -> Buffer:
        setup, settings = self.setup, Settings.from_environment()
        widest = max(plan.HIDDENS)
        options: dict[str, Any] = {"num_nvl_bytes": plan.SMALL_BYTES}
        if name == MAIN and setup.mode != "ll":
            planned = Buffer.memory_plan(
                setup.node_of,
                num_max_recv_tokens=2 * setup.ranks * plan.TOKENS_MAX,  # `ample` num_worst_tokens, with scales
                hidden=widest,
                num_topk=plan.TOPK_MAX,
                max_local_experts=plan.LOCAL_EXPERTS_MAX,
            )
            options["num_nvl_bytes"] = planned[self.rank].data_bytes
        if name == BESIDE or (name == MAIN and setup.mode != "ht"):
            most = plan.decode_tokens_max(setup.ranks), widest, setup.ranks, plan.DECODE_LOCAL_EXPERTS_MAX * setup.ranks
            options |= {"low_latency_mode": True, "num_rdma_bytes": Buffer.get_low_latency_rdma_size_hint(*most)}
        return Buffer(
            dist.group.WORLD,
            explicitly_destroy=True,
            node_of=setup.node_of,
            provider=setup.provider,
            timeout_ms=settings.timeout_ms if "EXPERTWIRE_TIMEOUT_MS" in settings.given() else TIMEOUT_MS,
            max_local_experts=max(plan.LOCAL_EXPERTS_MAX, plan.DECODE_LOCAL_EXPERTS_MAX),
            **options,
        )

    # ---- checks

    def _fail(self, what: str, of: object) -> None:
        self.outcome.failed += 1
        if len(self.outcome.failures) < FAILURES_KEPT:
            failure = f"ExpertwireError: iteration {self._iteration}, --seed {self.setup.seed}: {what} differs; {of}"
            self.outcome.failures.append(failure)
            self._say(failure)

    def _check(self, of: object, **pairs: tuple[object, object]) -> None:
        """Each (what came, what should) must be the same, bit for bit; what came is hashed."""
        for what, (got, want) in pairs.items():
            if isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor):
                content = raw(got).numpy().tobytes()
                self._hash.update(content)
                self.outcome.payload_bytes += len(content)
                right = same(got, want)
            else:
                self._hash.update(repr(got).encode())
                right = got == want
            if not right:
                self._fail(what, of)

    # ---- flights

    def _fly(self, flight: plan.Flight) -> Iterator[None]:
        """A generator that pauses after each phase."""
        if isinstance(flight, Decode):
            return self._decode(flight)
        return self._recall(flight) if isinstance(flight, Recall) else self._exchange(flight)

    def _exchange(self, flight: Exchange) -> Iterator[None]:
        routed, arrived = self._dispatch(flight)
        yield
        for number in range(flight.again):
            arrived = self._again(routed, flight.shape.seed + 1 + number)
            yield
        self._combine(routed, arrived, flight.shape.seed)
        if flight.keep:
            self._kept[flight.buffer] = routed

    def _recall(self, recall: Recall) -> Iterator[None]:
        routed = self._kept.get(recall.buffer)
        if routed is None:
            return
        self.outcome.calls["handles of earlier iterations"] += 1
        arrived = self._again(routed, recall.seed)
        yield
        self._combine(routed, arrived, recall.seed)

    def _dispatch(self, flight: Exchange) -> tuple[Routed, Arrived]:
        """The first dispatch of a flight."""
        shape, buffer = flight.shape, self.buffers[flight.buffer]
        given = [inputs(shape, self.setup, rank) for rank in range(self.setup.ranks)]
        ids = [one.topk_idx for one in given]
        all_weights = [one.topk_weights for one in given] if flight.weights else None
        in_ranks = [destinations(one.long(), shape.experts, self.setup.ranks) for one in ids]
        totals = torch.stack([in_rank.sum(0) for in_rank in in_ranks]).sum(0).tolist()
        worst = {"": 0, "ample": max(totals) + 9, "exact": max(1, *totals), "short": max(1, max(totals) - 1)}[flight.worst]
        kept = reference_keep(in_ranks, worst) if worst and worst < max(totals) else in_ranks
        sent = [rows_of(flight, one.x, shape.seed, rank) for rank, one in enumerate(given)]
        want = reference_dispatch(
            [x for x, _ in sent], kept, ids, all_weights, shape.experts, [scales for _, scales in sent if scales is not None] or None
        )[self.rank]
        x, scales = sent[self.rank]
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids[self.rank], shape.experts)
        payload: Any = x if scales is None else (x, scales)
        result: Any
        overflow = None
        try:
            result = buffer.dispatch(
                payload,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=ids[self.rank],
                topk_weights=given[self.rank].topk_weights if flight.weights else None,
                expert_alignment=flight.alignment,
                num_worst_tokens=worst,
            )
        except WorstTokensError as error:
            result, overflow = error.result, (error.rank, error.total, error.num_worst_tokens)
            self.outcome.calls["more rows than num_worst_tokens"] += 1
        received, received_ids, received_weights, counts, handle, _ = result
        self._count(flight, worst)
        first = next(((rank, total, worst) for rank, total in enumerate(totals) if worst and total > worst), None)
        self._check_dispatch(flight, want, received, received_ids, received_weights, handle)
        aligned = [-(-count // flight.alignment) * flight.alignment for count in want.expert_counts]
        listed = counts.tolist() if isinstance(counts, torch.Tensor) else counts
        self._check(flight, in_rank=(in_rank, in_ranks[self.rank]), counts=(listed, aligned), overflow=(overflow, first))
        return Routed(flight, handle, kept, received_weights, ids, all_weights), Arrived(rows_alone(received), [x for x, _ in sent])

    def _check_dispatch(
        self, flight: Exchange, want: ReferenceReceived, received: Any, ids: Any, weights: torch.Tensor | None, handle: Handle
    ) -> None:
        valid = len(want.x)
        self._check(flight, number_of_rows=((handle.num_recv_tokens, len(rows_alone(received))), (valid, handle.num_rows)))
        assert want.topk_idx is not None
        tail = torch.full((len(ids) - valid, ids.shape[1]), -1, dtype=ids.dtype)
        pairs: dict[str, tuple[object, object]] = {
            "ids": (ids, torch.cat([want.topk_idx, tail])),
            "source_tokens": (handle.recv_src_idx, want.src_idx),
            "rows": (rows_alone(received)[:valid], want.x),
        }
        if weights is not None:
            pairs["weights"] = (weights[:valid], want.topk_weights)
        if want.scales is not None:
            pairs["scales"] = (received[1][:valid], want.scales)
        self._check(flight, **pairs)

    def _count(self, flight: Exchange, worst: int) -> None:
        calls = self.outcome.calls
        calls["dispatches"] += 1
        calls["FP8 dispatches"] += bool(flight.scales)
        calls["dispatches of num_worst_tokens"] += bool(worst)
        calls["dispatches by the small buffer"] += flight.buffer == SMALL
        calls["dispatches without a token"] += not any(flight.shape.tokens)

    def _again(self, routed: Routed, seed: int) -> Arrived:
        """Other rows by a handle."""
        flight = routed.flight
        sent = [rows_of(flight, new_rows(flight.shape, seed, rank), seed, rank) for rank in range(self.setup.ranks)]
        want = reference_dispatch([x for x, _ in sent], routed.kept, scales=[scales for _, scales in sent if scales is not None] or None)[
            self.rank
        ]
        x, scales = sent[self.rank]
        given: Any = x if scales is None else (x, scales)
        received = self.buffers[flight.buffer].dispatch(given, handle=routed.handle)[0]
        rows, valid = rows_alone(received), len(want.x)
        self.outcome.calls["dispatches by a handle"] += 1
        pairs: dict[str, tuple[object, object]] = {"rows_by_handle": (rows[:valid], want.x)}
        if want.scales is not None:
            pairs["scales_by_handle"] = (received[1][:valid], want.scales)
        self._check(flight, **pairs)
        return Arrived(rows, [x for x, _ in sent])

    def _combine(self, routed: Routed, arrived: Arrived, seed: int) -> None:
        """Combine what the experts make of the rows of the last dispatch by this handle."""
        flight, rows = routed.flight, arrived.rows
        all_received = reference_dispatch(arrived.xs, routed.kept, routed.ids, routed.all_weights, flight.shape.experts)
        ys = [made_by(one.x, rank) for rank, one in enumerate(all_received)]
        all_biases = [biases(flight, seed, rank) for rank in range(self.setup.ranks)]
        weights = [one.topk_weights for one in all_received if one.topk_weights is not None] or None
        want, want_weights = reference_combine(ys, routed.kept, self.setup.node_of, weights, all_biases)[self.rank]
        valid = routed.handle.num_recv_tokens
        made = rows if flight.in_place and not flight.scales else torch.zeros(rows.shape, dtype=torch.bfloat16)
        made[:valid] = made_by(rows[:valid], self.rank)
        combined, combined_weights, _ = self.buffers[flight.buffer].combine(
            made, routed.handle, topk_weights=routed.weights, bias=_bias(all_biases[self.rank])
        )
        self.outcome.calls["combines"] += 1
        self._check(flight, sums=(combined, want))
        if want_weights is not None:
            self._check(flight, summed_weights=(combined_weights, want_weights))

    def _decode(self, flight: Decode) -> Iterator[None]:
        shape, buffer, ranks = flight.shape, self.buffers[flight.buffer], self.setup.ranks
        given = [inputs(shape, self.setup, rank) for rank in range(ranks)]
        own = given[self.rank]
        wants = reference_low_latency_dispatch([one.topk_idx for one in given], shape.experts)
        stats = torch.zeros(len(wants[self.rank].rows), dtype=torch.int32)
        received, counts, handle, _, hook = buffer.low_latency_dispatch(
            own.x,
            own.topk_idx,
            flight.tokens_max,
            shape.experts,
            stats,
            use_fp8=bool(flight.fp8),
            round_scale=flight.fp8 in ("round", "ue8m0"),
            use_ue8m0=flight.fp8 == "ue8m0",
            return_recv_hook=flight.hook,
        )
        if hook is not None:
            yield
            hook()
        packed = [quantise(one.x, flight.fp8 != "exact") if flight.fp8 else (one.x, None) for one in given]
        expected = [_by_expert(want.rows, packed) for want in wants]
        self._check(flight, counts=((counts.tolist(), stats.tolist()), (wants[self.rank].counts,) * 2))
        self._check(flight, layout_range=(handle[1], wants[self.rank].layout_range(ranks)))
        self._check_received(flight, received, expected[self.rank])
        seen = [[_as_seen(rows, scales) for rows, scales in one] for one in expected]
        ys = [[made_by(rows, rank, expert) for expert, rows in enumerate(one)] for rank, one in enumerate(seen)]
        yield
        y = torch.zeros((len(stats), ranks * flight.tokens_max, shape.hidden), dtype=torch.bfloat16)
        target = buffer.get_next_low_latency_combine_buffer(handle) if flight.zero_copy else y
        for expert, rows in enumerate(ys[self.rank]):
            target[expert, : len(rows)] = rows
        out = torch.empty((len(own.x), shape.hidden), dtype=torch.bfloat16) if flight.out else None
        combined, _, hook = buffer.low_latency_combine(
            y, own.topk_idx, own.topk_weights, handle, zero_copy=flight.zero_copy, return_recv_hook=flight.hook, out=out
        )
        if hook is not None:
            yield
            hook()
        sums = reference_low_latency_combine(ys, wants, [one.topk_weights for one in given], shape.hidden)[self.rank]
        self._check(flight, low_latency_sums=(combined, sums))
        self.outcome.calls["low-latency dispatches and combines"] += 1
        self.outcome.calls["low-latency FP8"] += bool(flight.fp8)

    def _check_received(self, flight: Decode, received: Any, expected: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        rows, scales = received if flight.fp8 else (received, None)
        for expert, (want, factors) in enumerate(expected):
            pairs: dict[str, tuple[object, object]] = {"low_latency_rows": (rows[expert, : len(want)], want)}
            if factors is not None and scales is not None:
                pairs["low_latency_scales"] = (
                    scales[expert, : len(want)], pack_ue8m0(factors) if flight.fp8 == "ue8m0" else factors
                )  # fmt: skip
            self._check(flight, **pairs)


def inputs(shape: Shape, setup: Setup, rank: int) -> Inputs:
    """Of a rank: x bf16 [T, H], topk_idx [T, K] of the shape's dtype, topk_weights f32 [T, K]."""
    routing = "uniform" if shape.routing == SPARSE else shape.routing
    drawn = bench.Setup(
        setup.node_of, shape.tokens, shape.hidden, shape.experts, shape.topk, routing, None, (), iterations=1, warmup=0, seed=shape.seed
    )
    given = bench.make_inputs(drawn, rank)
    ids = given.topk_idx
    if shape.routing == SPARSE:
        ids = ids.masked_fill(torch.rand(ids.shape, generator=_generator(shape.seed, rank, 3)) < 0.5, -1)
    return replace(given, topk_idx=ids.to(getattr(torch, shape.index)))


def _generator(seed: int, rank: int, what: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1009 + rank) * 7 + what)


def new_rows(shape: Shape, seed: int, rank: int) -> torch.Tensor:
    """Other rows of the same shape: bf16 [T, H]."""
    return torch.randn((shape.tokens[rank], shape.hidden), generator=_generator(seed, rank, 0)).bfloat16()


def rows_of(flight: Exchange, x: torch.Tensor, seed: int, rank: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What is sent: `x` itself, or FP8 rows of it with scales that anyone can derive."""
    if not flight.scales:
        return x, None
    width = -(-flight.shape.hidden // SCALE_COLUMNS[flight.scales])
    scales = torch.rand((len(x), width), generator=_generator(seed, rank, 1)) * 1000
    return (x.float() * 16).to(torch.float8_e4m3fn), scales.to(getattr(torch, flight.scales))


def biases(flight: Exchange, seed: int, rank: int) -> list[torch.Tensor]:
    """None, one or two of bf16 [T, H]."""
    shape, random = (flight.shape.tokens[rank], flight.shape.hidden), _generator(seed, rank, 2)
    return [torch.randn(shape, generator=random).bfloat16() for _ in range(flight.biases)]


def _bias(given: list[torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    if len(given) == 2:
        return given[0], given[1]
    return given[0] if given else None


def rows_alone(received: Any) -> torch.Tensor:
    """The rows of (rows, scales), or what has no scales."""
    rows: torch.Tensor = received[0] if isinstance(received, tuple) else received
    return rows


def _by_expert(
    rows: list[list[tuple[int, int, int]]], packed: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Rows, and scales if there are, that each expert of a rank receives."""
    begins = [0, *itertools.accumulate(len(x) for x, _ in packed)]
    every = torch.cat([x for x, _ in packed])
    factors = [scales for _, scales in packed if scales is not None]
    all_factors = torch.cat(factors) if factors else None
    found = []
    for chosen in rows:
        places = torch.tensor([begins[source] + token for source, token, _ in chosen], dtype=torch.int64)
        found.append((every[places], None if all_factors is None else all_factors[places]))
    return found


def _as_seen(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """What the experts see of received rows: bf16, after their way through FP8 if they took it."""
    return rows if scales is None else dequantise(rows, scales).bfloat16()
