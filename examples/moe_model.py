"""A small Qwen3-MoE-shaped model whose experts live on several ranks, beside the same model in one process.

Attention, norms and routers are on every rank, and each rank has sequences of its own; the experts of every layer are spread over them.
A token's row goes to the ranks of its experts with `Buffer.dispatch`, their outputs come home with `Buffer.combine`, and between the two
each rank computes what its experts make of the rows that it was sent. For training the same two calls serve once more: the gradient of a
dispatch is a combine, and the gradient of a combine is a dispatch with the same handle.

  python examples/moe_model.py                                  4 ranks as 2 nodes of 2: logits compared, about 10 seconds
  python examples/moe_model.py --train                          and a step of training: the loss, and the gradient of every weight
  python examples/moe_model.py --ranks 6 --ranks-per-node 3 --experts 20 --top-k 6
                                                                20 experts on 6 ranks: the first two own one more

What is compared: rows and expert outputs travel in bfloat16, so each rank's share of a token's sum is rounded once more than in one
process. Logits may differ by calc_diff < 1e-5 (1 − 2·Σxy / Σ(x² + y²)), gradients by 1e-4, losses by 1e-4 of themselves. Routers take the
same experts, except between two whose probabilities are nearer to each other than that rounding (2 %); such tokens are counted, and the
one process then follows the ranks' choice, so that the rest stays comparable.

exit status: 0 verified; 1 a comparison or a rank failed; 2 the command line cannot be meant; 3 something is missing on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from expertwire.cli.report import Exit, Report, RowStatus, check_path, options, terminal
from expertwire.ep import Buffer, Handle
from expertwire.ep.layout import expert_bounds
from expertwire.errors import ExpertwireError, InvalidArgumentError, UnavailableError

if TYPE_CHECKING:
    from expertwire.cli.launch import Rank

LOGITS_MAX, GRADIENTS_MAX, LOSS_MAX = 1e-5, 1e-4, 1e-4
NEAR_TIE = 0.02  # of a probability
LEARNING_RATE = 0.05


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of each rank's share of the batch; the proportions are Qwen3-MoE's, the numbers a laptop's."""

    hidden: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 16
    topk: int = 4
    intermediate: int = 64  # of one expert
    vocabulary: int = 256
    sequences: int = 2  # of each rank
    length: int = 32
    seed: int = 0


# ---- the exchange, as autograd sees it


class Dispatch(torch.autograd.Function):
    """Rows to the ranks of their experts. Its gradient is a combine: what came of a row on several ranks is summed at its home."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, buffer: Buffer, experts: int) -> tuple[Any, ...]:
        """x bf16 [T, H], weights f32 [T, K], ids int64 [T, K] → rows bf16 [N, H], their weights f32 [N, K], local ids [N, K], handle."""
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, experts)
        rows, local, share, _, handle, _ = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(local)
        return rows, share, local, handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Gradients of the rows received and of their weights, home."""
        grad_x, grad_weights, _ = ctx.buffer.combine(grads[0].contiguous(), ctx.handle, topk_weights=grads[1].contiguous())
        return grad_x, grad_weights, None, None, None


class Combine(torch.autograd.Function):
    """Rows home, summed over ranks. Its gradient is a dispatch: every rank that had a share gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, handle: Handle, buffer: Buffer) -> torch.Tensor:
        """y bf16 [N, H] → bf16 [T, H]."""
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(y, handle)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The gradient of the sums, out along the same routing."""
        return ctx.buffer.dispatch(grads[0].contiguous(), handle=ctx.handle)[0], None, None


# ---- the model


class Experts(nn.Module):
    """Experts [first, end) of a layer: SwiGLU, each with weights of its own."""

    def __init__(self, shape: Shape, first: int, end: int) -> None:
        super().__init__()
        scale = shape.hidden**-0.5
        # All experts are drawn and a part is kept, so that every way of spreading them has the same weights.
        self.gate_up = nn.Parameter((torch.randn(shape.experts, 2 * shape.intermediate, shape.hidden) * scale)[first:end].clone())
        self.down = nn.Parameter((torch.randn(shape.experts, shape.hidden, shape.intermediate) * 2 * scale)[first:end].clone())

    def forward(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """rows bf16 [N, H], ids [N, K] counted from the first expert here (−1: none), weights f32 [N, K] → weighted sums, bf16 [N, H]."""
        # A product with the rows, not fresh zeros: a rank that was sent nothing must still take part in the backward exchange.
        out = rows.float() * 0
        for expert in range(self.gate_up.shape[0]):
            row, slot = (ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(rows[row].float(), self.gate_up[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down[expert])
            out = out.index_add(0, row, y * weights[row, slot, None])
        return out.bfloat16()


class Mixture(nn.Module):
    """Router and experts. With a Buffer the experts are those of one rank and tokens travel; without, all of them are here."""

    def __init__(self, shape: Shape, first: int, end: int, buffer: Buffer | None) -> None:
        super().__init__()
        self.shape, self.buffer = shape, buffer
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = Experts(shape, first, end)
        self.chosen: list[torch.Tensor] = []  # the experts of each pass
        self.follow: list[torch.Tensor] = []  # choices to take over
        self.differs, self.wrong = 0, 0  # tokens that would have chosen otherwise; those of them that had no near tie

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x f32 [T, H]."""
        weights, ids = self.route(F.softmax(self.router(x), dim=-1))
        rows = x.bfloat16()
        if self.buffer is None:
            return self.experts(rows, ids, weights).float()
        received, share, local, handle = Dispatch.apply(rows, weights, ids, self.buffer, self.shape.experts)
        return Combine.apply(self.experts(received, local, share), handle, self.buffer).float()

    def route(self, probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The top k, their weights summing to 1, as Qwen3-MoE has it."""
        chosen, ids = probabilities.topk(self.shape.topk, dim=-1)
        if self.follow:
            other = self.follow[len(self.chosen)]
            differs = (other.sort(dim=-1).values != ids.sort(dim=-1).values).any(1)
            taken = probabilities.gather(1, other)
            away = differs & (taken.min(1).values < chosen.min(1).values * (1 - NEAR_TIE))
            self.differs, self.wrong = self.differs + int(differs.sum()), self.wrong + int(away.sum())
            chosen, ids = taken, other
        self.chosen.append(ids)
        return chosen / chosen.sum(-1, keepdim=True), ids


class Attention(nn.Module):
    """Causal, grouped queries, RoPE, and norms of queries and keys as Qwen3 has them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.kv = nn.Linear(shape.hidden, 2 * shape.kv_heads * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(shape.head_dim, eps=1e-6), nn.RMSNorm(shape.head_dim, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x f32 [B, L, H]."""
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.shape.heads, self.shape.head_dim)
        k, v = self.kv(x).view(batch, length, 2, self.shape.kv_heads, self.shape.head_dim).unbind(2)
        q, k = turned(self.q_norm(q)), turned(self.k_norm(k))
        groups = self.shape.heads // self.shape.kv_heads
        k, v = (part.transpose(1, 2).repeat_interleave(groups, dim=1) for part in (k, v))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions. x [B, L, heads, D]."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Layer(nn.Module):
    """Attention and a mixture of experts, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape, first: int, end: int, buffer: Buffer | None) -> None:
        super().__init__()
        self.before_attention, self.before_mixture = nn.RMSNorm(shape.hidden, eps=1e-6), nn.RMSNorm(shape.hidden, eps=1e-6)
        self.attention, self.mixture = Attention(shape), Mixture(shape, first, end, buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x f32 [B, L, H]."""
        x = x + self.attention(self.before_attention(x))
        return x + self.mixture(self.before_mixture(x).flatten(0, 1)).view_as(x)


class Model(nn.Module):
    """The whole of it. `first`, `end`: the experts of every layer that are here; the same seed gives the same weights everywhere."""

    def __init__(self, shape: Shape, first: int = 0, end: int | None = None, buffer: Buffer | None = None) -> None:
        super().__init__()
        torch.manual_seed(shape.seed)
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        last = shape.experts if end is None else end
        self.layers = nn.ModuleList([Layer(shape, first, last, buffer) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens int64 [B, L] → logits f32 [B, L, V]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def mixtures(self) -> list[Mixture]:
        """The mixture of each layer."""
        return [layer.mixture for layer in self.layers]


def batch_of(shape: Shape, rank: int) -> torch.Tensor:
    """A rank's sequences, int64 [B, L + 1]: the last token of each is only predicted."""
    random = torch.Generator().manual_seed(shape.seed * 1009 + rank + 1)
    return torch.randint(shape.vocabulary, (shape.sequences, shape.length + 1), generator=random)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor, tokens_of_all: int) -> torch.Tensor:
    """This rank's part of the mean cross entropy over all ranks' tokens."""
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / tokens_of_all


# ---- several ranks


@dataclass(frozen=True)
class Outcome:
    """What came out, in arrays. Of a rank: its sequences, its experts. `losses` before and after a step of training."""

    logits: np.ndarray[Any, Any]
    ids: list[list[np.ndarray[Any, Any]]]  # by layer and pass
    losses: list[float]
    gradients: dict[str, np.ndarray[Any, Any]]
    differs: int = 0
    wrong: int = 0


def spread(buffer: Buffer, group: dist.ProcessGroup, shape: Shape, train: bool) -> Outcome:
    """The model on the ranks of a Buffer, seen from one of them. Collective."""
    bounds = expert_bounds(shape.experts, buffer.group_size)
    model = Model(shape, bounds[buffer.rank], bounds[buffer.rank + 1], buffer)

    def total(value: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(value, group=group)
        return value

    return exercised(model, batch_of(shape, buffer.rank), buffer.group_size, train, total)


def exercised(model: Model, tokens: torch.Tensor, ranks: int, train: bool, total: Callable[[torch.Tensor], torch.Tensor]) -> Outcome:
    """Logits and, if asked, one step of gradient descent. `total` adds up over the ranks what each has of the same weight."""
    tokens_of_all = tokens.shape[0] * (tokens.shape[1] - 1) * (ranks if model.mixtures()[0].buffer is not None else 1)
    if not train:
        with torch.no_grad():
            return outcome(model, model(tokens[:, :-1]), [], {})
    logits = model(tokens[:, :-1])
    loss = loss_of(logits, tokens, tokens_of_all)
    loss.backward()
    losses = [float(total(loss.detach().clone()))]
    gradients = {}
    for name, weight in model.named_parameters():
        own = torch.zeros_like(weight) if weight.grad is None else weight.grad  # none where a rank has no expert
        # A rank's experts have the gradient of all ranks' tokens already: the tokens came to them.
        gradient = own if ".experts." in name else total(own)
        gradients[name] = gradient.numpy().copy()
        weight.data -= LEARNING_RATE * gradient
    with torch.no_grad():
        losses.append(float(total(loss_of(model(tokens[:, :-1]), tokens, tokens_of_all))))
    return outcome(model, logits, losses, gradients)


def outcome(model: Model, logits: torch.Tensor, losses: list[float], gradients: dict[str, np.ndarray[Any, Any]]) -> Outcome:
    """What the model has just done."""
    mixtures = model.mixtures()
    ids = [[one.numpy().copy() for one in mixture.chosen] for mixture in mixtures]
    counted = sum(mixture.differs for mixture in mixtures), sum(mixture.wrong for mixture in mixtures)
    return Outcome(logits.detach().numpy().copy(), ids, losses, gradients, *counted)


# ---- one process, and the comparison


def alone(shape: Shape, ranks: Sequence[Outcome], train: bool) -> Outcome:
    """The model in this process, with all ranks' sequences, following the ranks' choices of experts (and counting where it would not)."""
    model = Model(shape)
    for place, mixture in enumerate(model.mixtures()):
        passes = zip(*(one.ids[place] for one in ranks), strict=True)
        mixture.follow = [torch.from_numpy(np.concatenate(choices)) for choices in passes]
    tokens = torch.cat([batch_of(shape, rank) for rank in range(len(ranks))])
    return exercised(model, tokens, len(ranks), train, lambda value: value)


def calc_diff(found: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float:
    """1 − 2·Σxy / Σ(x² + y²), DeepEP's measure; 0 where both are all zeros."""
    x, y = found.astype(np.float64), want.astype(np.float64)
    total = float((x * x + y * y).sum())
    return 1 - 2 * float((x * y).sum()) / total if total else 0.0


def compare(report: Report, shape: Shape, ranks: Sequence[Outcome], one: Outcome, train: bool) -> None:
    """Rows of what was compared, each with its limit."""

    def add(name: str, value: float, most: float, **labels: Any) -> None:
        report.add(name, value, "", RowStatus.OK if value <= most else RowStatus.FAILED, most=most, **labels)

    choices = sum(ids.shape[0] for rank in ranks for layer in rank.ids for ids in layer)
    add("logits_calc_diff", calc_diff(np.concatenate([rank.logits for rank in ranks]), one.logits), LOGITS_MAX)
    report.add("near_ties", one.differs, "tokens", of=choices)
    add("other_experts", one.wrong, 0)
    if not train:
        return
    for place, when in enumerate(("before", "after")):
        for rank in ranks:
            if abs(rank.losses[place] - ranks[0].losses[place]) > 0:
                add("loss_between_ranks", abs(rank.losses[place] - ranks[0].losses[place]), 0, step=when)
        add("loss_difference", abs(ranks[0].losses[place] / one.losses[place] - 1), LOSS_MAX, step=when, loss=round(one.losses[place], 4))
    worst: dict[str, tuple[float, str]] = {}
    for name, want in one.gradients.items():
        spread_out = ".experts." in name
        found = np.concatenate([rank.gradients[name] for rank in ranks]) if spread_out else ranks[0].gradients[name]
        kind = "experts" if spread_out else "router" if ".router." in name else "others"
        worst[kind] = max(worst.get(kind, (0.0, name)), (calc_diff(found, want), name))
    for kind, (difference, name) in sorted(worst.items()):
        add("gradient_calc_diff", difference, GRADIENTS_MAX, weights=kind, worst=name)


# ---- the command


def rank_main(rank: Rank, shape: Shape, ranks_per_node: int, train: bool) -> Outcome:
    """A process of the job."""
    buffer = Buffer(dist.group.WORLD, 32 << 20, node_of=[place // ranks_per_node for place in range(rank.size)])
    try:
        return spread(buffer, dist.group.WORLD, shape, train)
    finally:
        buffer.destroy()


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    defaults = Shape()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=4, help="processes (default 4)")
    parser.add_argument("--ranks-per-node", type=int, default=2, help="ranks that count as one node; the rest is reached over a fabric")
    parser.add_argument("--train", action="store_true", help="also one step of training: loss and gradients compared")
    sizes = {"layers": "layers", "experts": "experts of a layer", "hidden": "width", "seed": "seed of weights and tokens"}
    for name, what in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name), help=f"{what} (default {getattr(defaults, name)})")
    parser.add_argument("--top-k", type=int, default=defaults.topk, help=f"experts of a token (default {defaults.topk})")
    parser.add_argument("--length", type=int, default=defaults.length, help=f"tokens of a sequence (default {defaults.length})")
    parser.add_argument("--sequences", type=int, default=defaults.sequences, help=f"sequences of a rank (default {defaults.sequences})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, - for stdout")
    args = parser.parse_args(words)
    for name in ("ranks", "ranks_per_node", "layers", "experts", "hidden", "top_k", "length", "sequences"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; the least is 1")
    if args.top_k > args.experts:
        parser.error(f"--top-k is {args.top_k}; a token can have at most the {args.experts} of --experts")
    return args


def run(args: argparse.Namespace) -> int:
    """Ranks, then one process, then the table."""
    from expertwire.cli.launch import launch

    check_path("--json", args.json)
    shape = Shape(
        hidden=args.hidden,
        layers=args.layers,
        experts=args.experts,
        topk=args.top_k,
        sequences=args.sequences,
        length=args.length,
        seed=args.seed,
    )
    torch.set_num_threads(1)  # as the ranks have it: at these sizes more threads cost more than they give
    ranks = launch(rank_main, (shape, args.ranks_per_node, args.train), args.ranks, timeout_s=300.0)
    report = Report("examples/moe_model.py", {"options": options(args), **asdict(shape)})
    compare(report, shape, ranks, alone(shape, ranks, args.train), args.train)
    report.write(args.json)
    if str(args.json) != "-":
        terminal().print(report.table(f"{args.ranks} ranks against one process: {shape.layers} layers, {shape.experts} experts"))
    return report.exit_status()


def main(words: Sequence[str] | None = None) -> int:
    """The exit status of the command."""
    args = parsed(words)
    statuses = {InvalidArgumentError: Exit.USAGE, UnavailableError: Exit.SKIPPED, ExpertwireError: Exit.FAILED}
    try:
        return run(args)
    except ExpertwireError as error:
        print(f"moe_model: {error}", file=sys.stderr)
        return next(status for kind, status in statuses.items() if isinstance(error, kind))


if __name__ == "__main__":
    sys.exit(main())
