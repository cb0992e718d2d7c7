"""All variants of dispatch and combine in high-throughput mode, verified bit for bit against the oracle (src/expertwire/ep/reference.py).

    python benchmarks/ep_variants.py [--tokens 1024,4096] [--hidden 7168] [--experts 256] [--topk 8] [--ranks 2] [--ranks-per-node 1,2]
                                     [--provider tcp] [--json FILE]

A variant is one of each: BF16 or FP8 with scales; async_finish or not; previous_event or not (with async_finish also
allocate_on_comm_stream); a fresh dispatch, or after it another one of other rows by its handle; num_worst_tokens or not. Every variant has
rows of its own and ends with a combine of rows and weights. Compared: rows, scales, ids, weights, counts, what is behind the last row, sums
and summed weights. Prints one line for each node table, number of tokens and dtype; the exit status is 0 only when all were verified.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from expertwire.cli.bench import ep as bench
from expertwire.cli.bench.paired import Inputs, destinations, expert_rows, variant_scale
from expertwire.cli.launch import Rank, RankError, launch
from expertwire.cli.report import Report, RowStatus
from expertwire.ep import Buffer
from expertwire.ep.handle import Handle
from expertwire.ep.reference import ReferenceReceived, reference_combine, reference_dispatch

SCALE_COLUMNS = 128
SPARE_ROWS = 7  # of num_worst_tokens beyond the fullest rank
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Variant:
    """How one exchange is asked for; `number` tells its rows from those of the others."""

    number: int
    dtype: str
    asynchronous: bool
    previous: bool
    cached: bool
    worst: bool


def variants() -> list[Variant]:
    """All of them, numbered."""
    choices = itertools.product(("bf16", "fp8"), (False, True), (False, True), (False, True), (False, True))
    return [Variant(number, *choice) for number, choice in enumerate(choices)]


def payload(given: Inputs, dtype: str, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows that a variant sends, and for FP8 their scales f32 [T, ⌈H/128⌉]: other bytes in every element for every number."""
    if dtype == "bf16":
        return given.x * variant_scale(number), None
    groups = blocks(given.x)
    scales = groups.abs().amax(2).clamp(min=1e-4) / 448
    rows = (groups / scales[..., None]).flatten(1).to(torch.float8_e4m3fn)
    if number % 2:
        rows.view(torch.uint8).bitwise_xor_(0x80)
    return rows, scales * (number + 1)


def blocks(rows: torch.Tensor) -> torch.Tensor:
    """f32 [N, H/128, 128]."""
    return rows.float().view(len(rows), rows.shape[1] // SCALE_COLUMNS, SCALE_COLUMNS)


def made_of(rows: torch.Tensor, scales: torch.Tensor | None, rank: int) -> torch.Tensor:
    """What the experts of a rank give back, bf16: it differs between ranks, and follows from rows and scales alone."""
    if scales is not None:
        rows = (blocks(rows) * scales[..., None]).flatten(1).bfloat16()
    return expert_rows(rows, rank)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """The same bytes of the same shape and dtype."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


class Checker:
    """One rank with one Buffer and one shape."""

    def __init__(self, setup: bench.Setup, rank: int) -> None:
        self.setup, self.rank = setup, rank
        self.given = [bench.make_inputs(setup, source) for source in range(setup.ranks)]
        self.ids = [one.topk_idx for one in self.given]
        self.weights = [one.topk_weights for one in self.given]
        self.in_ranks = [destinations(one, setup.experts, setup.ranks) for one in self.ids]
        self.most = max(torch.stack([in_rank.sum(0) for in_rank in self.in_ranks]).sum(0).tolist()) + SPARE_ROWS
        local_experts = -(-setup.experts // setup.ranks)
        plan = Buffer.memory_plan(
            setup.node_of, num_max_recv_tokens=self.most, hidden=setup.hidden, num_topk=setup.topk, max_local_experts=local_experts
        )
        self.buffer = Buffer(
            dist.group.WORLD,
            num_nvl_bytes=plan[rank].data_bytes,
            explicitly_destroy=True,
            node_of=setup.node_of,
            provider=setup.provider,
            max_local_experts=local_experts,
        )

    def check(self, variant: Variant) -> list[str]:
        """Faults of one variant on this rank."""
        first = [payload(one, variant.dtype, 2 * variant.number) for one in self.given]
        wants = self._wanted(first)
        faults, result = self._dispatch(variant, first[self.rank], wants[self.rank])
        rows, weights, handle = result
        if variant.cached:
            del rows
            second = [payload(one, variant.dtype, 2 * variant.number + 1) for one in self.given]
            wants = self._wanted(second)
            rows = self.buffer.dispatch(_given(second[self.rank]), handle=handle, **self._worst(variant), **self._events(variant))[0]
            faults += [f"by its handle: {fault}" for fault in _rows_differ(rows, wants[self.rank])]
        return faults + self._combine(variant, rows, weights, handle, wants)

    def _wanted(self, sent: list[tuple[torch.Tensor, torch.Tensor | None]]) -> list[ReferenceReceived]:
        scales = [factor for _, factor in sent if factor is not None] or None
        return reference_dispatch([rows for rows, _ in sent], self.in_ranks, self.ids, self.weights, self.setup.experts, scales)

    def _events(self, variant: Variant) -> dict[str, Any]:
        previous = Buffer.capture() if variant.previous else None
        both = variant.previous and variant.asynchronous
        return {"previous_event": previous, "async_finish": variant.asynchronous, "allocate_on_comm_stream": both}

    def _worst(self, variant: Variant) -> dict[str, Any]:
        return {"num_worst_tokens": self.most} if variant.worst else {}

    def _dispatch(self, variant: Variant, sent: Any, want: ReferenceReceived) -> tuple[list[str], tuple[Any, Any, Handle]]:
        own = self.given[self.rank]
        per_rank, per_node, per_expert, in_rank, event = self.buffer.get_dispatch_layout(
            own.topk_idx, self.setup.experts, **self._events(variant)
        )
        event.current_stream_wait()
        rows, ids, weights, counts, handle, event = self.buffer.dispatch(
            _given(sent),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=own.topk_idx,
            topk_weights=own.topk_weights,
            **self._worst(variant),
            **self._events(variant),
        )
        event.current_stream_wait()
        assert handle is not None
        assert ids is not None
        assert weights is not None
        assert want.topk_idx is not None
        assert want.topk_weights is not None
        valid, total = len(want.x), self.most if variant.worst else len(want.x)
        listed = counts.tolist() if isinstance(counts, torch.Tensor) else counts
        right = {
            "layout": torch.equal(in_rank, self.in_ranks[self.rank]),
            "number of rows": len(ids) == total and handle.num_recv_tokens == valid,
            "ids": same(ids[:valid], want.topk_idx),
            "ids behind the last row": bool((ids[valid:] == -1).all()),
            "weights": same(weights[:valid], want.topk_weights),
            "counts": listed == want.expert_counts and isinstance(counts, torch.Tensor) == variant.worst,
        }
        return [what for what, good in right.items() if not good] + _rows_differ(rows, want), (rows, weights, handle)

    def _combine(self, variant: Variant, received: Any, weights: torch.Tensor, handle: Handle, wants: list[ReferenceReceived]) -> list[str]:
        rows, scales = received if isinstance(received, tuple) else (received, None)
        valid = handle.num_recv_tokens
        made = torch.full(rows.shape, float("nan"), dtype=torch.bfloat16)
        made[:valid] = made_of(rows[:valid], None if scales is None else scales[:valid], self.rank)
        combined, combined_weights, event = self.buffer.combine(made, handle, topk_weights=weights, **self._events(variant))
        event.current_stream_wait()
        ys = [made_of(want.x, want.scales, rank) for rank, want in enumerate(wants)]
        all_weights = [want.topk_weights for want in wants if want.topk_weights is not None]
        sums, summed_weights = reference_combine(ys, self.in_ranks, self.setup.node_of, all_weights)[self.rank]
        assert combined_weights is not None
        assert summed_weights is not None
        right = {"sums": same(combined, sums), "summed weights": same(combined_weights, summed_weights)}
        return [what for what, good in right.items() if not good]


def _given(sent: tuple[torch.Tensor, torch.Tensor | None]) -> Any:
    rows, scales = sent
    return rows if scales is None else (rows, scales)


def _rows_differ(received: Any, want: ReferenceReceived) -> list[str]:
    rows, scales = received if isinstance(received, tuple) else (received, None)
    right = {"rows": same(rows[: len(want.x)], want.x)}
    if want.scales is not None:
        right["scales"] = scales is not None and same(scales[: len(want.x)], want.scales)
    return [what for what, good in right.items() if not good]


def verify(rank: Rank, setup: bench.Setup) -> tuple[list[list[str]], int]:
    """Faults of each variant on this rank, and how many operations its provider was given."""
    checker = Checker(setup, rank.rank)
    every = variants()
    faults = []
    for done, variant in enumerate(every, 1):
        faults.append(checker.check(variant))
        rank.progress("variants", done, len(every))
    posted = checker.buffer.statistics()["provider_posted"]
    checker.buffer.destroy()
    return faults, posted


def add_rows(report: Report, setup: bench.Setup, outcomes: list[tuple[list[list[str]], int]], took_s: float) -> None:
    """One row for each variant, one line for each dtype, every fault on stderr."""
    posted = sum(count for _, count in outcomes)
    by_dtype: dict[str, list[bool]] = {}
    for variant in variants():
        faults = [f"rank {rank}: {fault}" for rank, (one, _) in enumerate(outcomes) for fault in one[variant.number]]
        if len(set(setup.node_of)) > 1 and not posted:
            faults.append("nothing was posted to the provider")
        labels: dict[str, Any] = {
            "device": "cpu", "ranks": setup.ranks, "ranks_per_node": setup.node_of.count(0), "tokens": setup.tokens[0],
            "hidden": setup.hidden, "experts": setup.experts, "topk": setup.topk, "dtype": variant.dtype, "mode": "high_throughput",
            "provider": str(setup.provider), "async_finish": variant.asynchronous, "previous_event": variant.previous,
            "cached": variant.cached, "worst_tokens": variant.worst,
        }  # fmt: skip
        report.add("verified", int(not faults), "", RowStatus.FAILED if faults else RowStatus.OK, **labels)
        by_dtype.setdefault(variant.dtype, []).append(not faults)
        for fault in faults[:10]:
            print(f"{variant}: {fault}", file=sys.stderr, flush=True)
    for dtype, good in by_dtype.items():
        shape = f"{setup.ranks} ranks, nodes of {setup.node_of.count(0)}, {setup.tokens[0]} tokens, hidden {setup.hidden}, {dtype}"
        print(f"{shape}: {sum(good)} of {len(good)} variants verified ({took_s:.1f} s, {posted} operations posted)", flush=True)


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1024,4096", metavar="T,T")
    parser.add_argument("--hidden", type=int, default=7168, help=f"a multiple of {SCALE_COLUMNS}")
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ranks-per-node", default="1,2", metavar="N,N")
    parser.add_argument("--provider", default="tcp", help="what carries rows between nodes (default tcp)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    report = Report("ep_variants", {"provider": arguments.provider})
    for per_node, tokens in itertools.product(*(map(int, text.split(",")) for text in (arguments.ranks_per_node, arguments.tokens))):
        ranks = arguments.ranks
        node_of = tuple(rank // per_node for rank in range(ranks))
        setup = bench.Setup(
            node_of, (tokens,) * ranks, arguments.hidden, arguments.experts, arguments.topk, "uniform", arguments.provider, (), 1, 0, 1
        )
        begin = time.monotonic()
        try:
            add_rows(report, setup, launch(verify, (setup,), ranks, timeout_s=TIMEOUT_S), time.monotonic() - begin)
        except RankError as error:
            report.add(
                "verified", 0, "", RowStatus.FAILED, ranks=ranks, ranks_per_node=per_node, tokens=tokens, why=str(error).partition("\n")[0]
            )
            print(error, file=sys.stderr, flush=True)
        report.write(arguments.json)  # as far as it has come
    return report.exit_status()


if __name__ == "__main__":
    sys.exit(main())
