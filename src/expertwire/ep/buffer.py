"""`Buffer`: DeepEP's surface. It checks arguments and delegates; the work is done by the backend of the tensors' device."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, TypeVar, cast

import torch

from expertwire.ep import checks
from expertwire.ep.config import (
    CALL_ROWS_MAX,
    COMBINE_TABLE,
    DISPATCH_TABLE,
    HIDDEN_MAX,
    LOCAL_EXPERTS_MAX,
    REGION_BYTES_MAX,
    ROWS_MAX,
    TOPK_MAX,
    Config,
    low_latency_rdma_size_hint,
    nearest_config,
    require_int,
)
from expertwire.ep.event import EventHandle, EventOverlap
from expertwire.ep.handle import Handle, Identity
from expertwire.ep.layout import check_node_table
from expertwire.ep.low_latency import LowLatencyOperations
from expertwire.ep.renewal import Renewal, State
from expertwire.ep.variants import keywords
from expertwire.errors import (
    DeadlineError,
    ExcludedError,
    InvalidArgumentError,
    InvalidTypeError,
    PeerError,
    StateError,
    TransferError,
    UnavailableError,
)
from expertwire.fabric.config import TIMEOUT_MS_MAX

topk_idx_t = torch.int64
_Sent = TypeVar("_Sent", torch.Tensor, tuple[torch.Tensor, torch.Tensor])  # BF16 rows, or FP8 rows with scales

# Names that variants of DeepEP's Buffer take and that ask for nothing here.
_VARIANTS = frozenset({"use_fabric", "allow_nvlink_for_normal_mode", "is_intranode"})
_numbers = itertools.count()


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one rank allocates for a Buffer."""

    control_bytes: int
    staging_bytes: int
    data_bytes: int
    low_latency_control_bytes: int = 0
    low_latency_data_bytes: int = 0  # of `num_rdma_bytes` with low_latency_mode, rounded up

    @property
    def total_bytes(self) -> int:
        """All of it."""
        ours = self.control_bytes + self.staging_bytes + self.data_bytes
        return ours + self.low_latency_control_bytes + self.low_latency_data_bytes


class Buffer(LowLatencyOperations, Renewal):
    """Communication buffer of one rank for expert-parallel dispatch and combine.

    Making it, `dispatch`, `combine` and `destroy` are collective: every rank of the group calls them, in the same order. Calls from several
    threads are serialised. After an operation has failed half-way (deadline, dead peer, Ctrl-C) the Buffer is failed: every later call
    raises `StateError` naming the first error, and only `shrink`, which makes the Buffer live again among those that are left, `reset`, on
    CUDA tensors, and `destroy` work.
    """

    num_sms: ClassVar[int] = 20
    _identity: Identity

    def __init__(
        self,
        group: object,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: object = None,
        *,
        node_of: Sequence[object] | None = None,
        provider: str | None = None,
        timeout_ms: int | None = None,
        max_local_experts: int = 2048,
        sync_writes: bool | None = None,
        device: str | torch.device | None = None,
        **variants: object,
    ) -> None:
        """Exchange settings over `group`, prove which ranks share memory, and allocate.

        Args:
            group: a torch.distributed group (gloo is enough; of others only `all_gather_object` is used, and nothing after construction),
                or an `expertwire.ep.bootstrap.Launch`.
            num_nvl_bytes: bytes of the data region, which holds received rows and combine inputs. 0: 256 MiB, or, with low_latency_mode,
                as good as nothing: then the other mode is not wanted.
            num_rdma_bytes: most bytes for the rings to and from ranks of other nodes. 0: what they need for full speed. With
                low_latency_mode: bytes for that mode, as `get_low_latency_rdma_size_hint` says; the rings are beside it.
            low_latency_mode: the methods of that name work too.
            enable_shrink: a rank that is dead, has left, or does not answer a low-latency call until the deadline is masked, and the call
                goes on without it. Asks for nothing in the other mode: `shrink` works either way.
            explicitly_destroy: the caller promises to call `destroy()`. Either way a Buffer that dies, or lives at the interpreter's exit,
                is released.
            comm: an mpi4py communicator in place of `group`.
            node_of: node of each rank, numbers from 0 or names; by default ranks that can map each other's memory are one node.
            provider: network provider, "tcp" or "local"; by default `EXPERTWIRE_PROVIDER`, else the best found.
            timeout_ms: deadline of each operation; by default `EXPERTWIRE_TIMEOUT_MS`, else 100,000.
            max_local_experts: most experts per rank that any dispatch will have.
            sync_writes: post one write, wait for it, signal, then the next: the slow baseline; by default `EXPERTWIRE_SYNC_WRITES`.
            device: "cpu", the default, or "cuda": tensors of the caller's current GPU, among ranks of one node.
            num_qps_per_rank, allow_*, and the variants `use_fabric`, `allow_nvlink_for_normal_mode`, `is_intranode`: taken for callers'
                sake, they ask for nothing here.

        Raises:
            InvalidArgumentError: an argument cannot be used. UnavailableError: not there yet, or missing on this machine.
            MismatchError: ranks disagree on a setting. CapacityError: no room for a region.
        """
        for name in variants:
            if name not in _VARIANTS:
                raise InvalidTypeError(f"Buffer has no argument {name!r}; beside DeepEP's own it takes {', '.join(sorted(_VARIANTS))}")
        self.num_nvl_bytes = require_int("num_nvl_bytes", num_nvl_bytes, 0, REGION_BYTES_MAX)
        self.num_rdma_bytes = require_int("num_rdma_bytes", num_rdma_bytes, 0, REGION_BYTES_MAX)
        if low_latency_mode and not self.num_rdma_bytes:
            raise InvalidArgumentError("num_rdma_bytes is 0; low_latency_mode needs what get_low_latency_rdma_size_hint says")
        require_int("num_qps_per_rank", num_qps_per_rank, 1)
        self._local_experts_max = require_int("max_local_experts", max_local_experts, 1, LOCAL_EXPERTS_MAX)
        if timeout_ms is not None:
            require_int("timeout_ms", timeout_ms, 1, TIMEOUT_MS_MAX)
        self.group = group
        self.low_latency_mode = bool(low_latency_mode)
        self.explicitly_destroy = bool(explicitly_destroy)
        self.enable_shrink = bool(enable_shrink)
        from expertwire.ep.backends import open_backend
        from expertwire.ep.bootstrap import Launch, launch_of, settings_for

        launch: Launch = launch_of(group, comm, settings_for(None, timeout_ms).timeout_ms)
        self.rank, self.group_size = launch.rank, launch.size
        self.members = tuple(range(launch.size))  # what each rank's number was when the Buffer was made
        if node_of is not None:
            node_of = check_node_table("node_of", node_of, launch.size)
        self._identity = Identity(next(_numbers), self.rank)
        self._pid = os.getpid()
        # Taken again by the thread that has it where a signal handler or a finalizer runs within a call; `_within` says so.
        self._lock = threading.RLock()
        self._within = ""  # the operation of the thread that has the lock
        self._state = State.live
        self._first_error = ""
        self.runtime = open_backend(
            launch,
            device,
            data_bytes=self.num_nvl_bytes,
            staging_bytes_max=self.num_rdma_bytes,
            local_experts_max=max_local_experts,
            node_of=node_of,
            provider=provider,
            timeout_ms=timeout_ms,
            sync_writes=sync_writes,
            low_latency=self.low_latency_mode,
            shrink=self.enable_shrink,
        )

    # ---- statics

    @staticmethod
    @keywords()
    def is_sm90_compiled() -> bool:
        """Whether kernels for NVIDIA's sm90 are compiled in. Never: kernels are compiled when first used."""
        return False

    @staticmethod
    @keywords()
    def set_num_sms(new_num_sms: int) -> None:
        """Number of streaming multiprocessors for kernels, even: how many programs an operation has where no `config` is given. 0: 20.
        Sizes the hints of `Config` too."""
        number = require_int("new_num_sms", new_num_sms, 0)
        if number % 2:
            raise InvalidArgumentError(f"new_num_sms is {number}; it must be even")
        Buffer.num_sms = number

    @staticmethod
    @keywords()
    def capture() -> EventOverlap:
        """An event at the current point of the current stream. Complete already on CPU."""
        return EventOverlap(EventHandle())

    @staticmethod
    @keywords()
    def get_dispatch_config(num_ranks: int) -> Config:
        """Tuned values for a dispatch among `num_ranks` ranks: the table's entry or the nearest one."""
        return nearest_config(DISPATCH_TABLE, num_ranks, Buffer.num_sms)

    @staticmethod
    @keywords()
    def get_combine_config(num_ranks: int) -> Config:
        """Tuned values for a combine among `num_ranks` ranks: the table's entry or the nearest one."""
        return nearest_config(COMBINE_TABLE, num_ranks, Buffer.num_sms)

    @staticmethod
    @keywords()
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        """Bytes of `num_rdma_bytes` that the low-latency mode needs."""
        return low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @staticmethod
    @keywords()
    def memory_plan(
        node_of: Sequence[object],
        *,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_max_recv_tokens: int = 0,
        num_max_dispatch_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_experts: int = 0,
        num_topk: int = 0,
        max_local_experts: int = 2048,
    ) -> list[MemoryPlan]:
        """Bytes that each rank of such a Buffer allocates, before anything is allocated. [R]

        With `num_max_recv_tokens` and `hidden` (BF16), the data region is one in which a dispatch that receives so many rows is returned as
        views and its combine input fits too: give that plan's `data_bytes` as `num_nvl_bytes`. With `low_latency_mode`,
        `num_max_dispatch_tokens_per_rank`, `hidden`, `num_experts` and `num_topk`, that mode's memory is the least in which such a dispatch
        of any format and its combine (without zero_copy) have room, often far less than the hint: give `low_latency_data_bytes` as
        `num_rdma_bytes`.
        """
        from expertwire.ep.cpu.sizes import data_bytes_of_rows, low_latency_bytes_least, region_sizes

        nodes = check_node_table("node_of", node_of)
        data = require_int("num_nvl_bytes", num_nvl_bytes, 0, REGION_BYTES_MAX)
        rdma = require_int("num_rdma_bytes", num_rdma_bytes, 0, REGION_BYTES_MAX)
        local_experts = require_int("max_local_experts", max_local_experts, 1, LOCAL_EXPERTS_MAX)
        rows = require_int("num_max_recv_tokens", num_max_recv_tokens, 0, ROWS_MAX)
        tokens = require_int("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 0, CALL_ROWS_MAX)
        width = require_int("hidden", hidden, 0, HIDDEN_MAX)
        topk = require_int("num_topk", num_topk, 0, TOPK_MAX)
        if rows and width:
            data = max(data, data_bytes_of_rows(rows, 2 * width, topk))
        if low_latency_mode and tokens:
            experts = require_int("num_experts", num_experts, 1, CALL_ROWS_MAX)
            require_int("hidden", width, 1)
            rdma = max(rdma, low_latency_bytes_least(nodes, tokens, width, experts, require_int("num_topk", topk, 1)))
        if low_latency_mode and not rdma:
            raise InvalidArgumentError(
                "num_rdma_bytes is 0 with low_latency_mode; give it, or num_max_dispatch_tokens_per_rank and the shape"
            )
        sizes = [
            region_sizes(rank, nodes, data_bytes=data, rdma_bytes=rdma, local_experts_max=local_experts, low_latency=bool(low_latency_mode))
            for rank in range(len(nodes))
        ]
        names = ("control", "staging", "data", "ll_control", "ll_data")
        return [MemoryPlan(*(size.get(name, 0) for name in names)) for size in sizes]

    # ---- what is

    @property
    def node_of(self) -> tuple[int, ...]:
        """Node of each rank, as proved or given."""
        return self.runtime.node_of

    @property
    def num_nodes(self) -> int:
        """Number of nodes: RR."""
        return max(self.node_of) + 1

    @property
    def provider(self) -> str:
        """What carries rows between nodes: "local", "tcp", …."""
        return self.runtime.provider

    @keywords()
    def statistics(self) -> dict[str, int]:
        """Counters of the transport, a snapshot: what was posted to other nodes, completed, retried and so on."""
        with self._holding("statistics"):
            return self.runtime.statistics()

    def __repr__(self) -> str:
        return f"<Buffer rank {self.rank} of {self.group_size}, {self.num_nodes} nodes, {self._state.value}>"

    @keywords()
    def get_comm_stream(self) -> torch.Stream:
        """The stream that operations run on. Raises `UnavailableError` on CPU: operations run in the caller's thread."""
        if (stream := self.runtime.comm_stream) is None:
            raise UnavailableError("this Buffer works on CPU tensors, which have no streams: operations run in the calling thread")
        return stream

    @keywords()
    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | Sequence[int] | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """The data region of this rank as a tensor of `dtype`, from byte `offset`. It holds received rows and no word of the protocol.
        What is written here may be given to a call; any call's rows may land over it, so it is there until the next one only.

        Args:
            size: shape; None: one dimension, all that is left.
            use_rdma_buffer: the low-latency mode's memory instead. It holds rows alone too, so it may be zeroed between calls.
        """
        if not isinstance(dtype, torch.dtype):
            raise InvalidTypeError(f"dtype must be a torch.dtype, got {dtype!r}")
        memory = self._low_latency("get_local_buffer_tensor with use_rdma_buffer") if use_rdma_buffer else self.runtime
        with self._holding("get_local_buffer_tensor"):
            total = memory.data_bytes
            start = require_int("offset", offset, 0, total)
            if start % dtype.itemsize:
                raise InvalidArgumentError(f"offset is {start}; it must be a multiple of {dtype.itemsize}, the bytes of {dtype}")
            shape = tuple(size) if size is not None else ((total - start) // dtype.itemsize,)
            count = 1
            for place, length in enumerate(shape):
                count *= require_int(f"size[{place}]", length, 0)
            if count * dtype.itemsize > total - start:
                needed = count * dtype.itemsize
                raise InvalidArgumentError(f"size is {list(shape)}: {needed} bytes from offset {start}; the region has {total} bytes")
            return memory.data_tensor(dtype, start, shape)

    # ---- operations

    @keywords()
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Who gets what. Local: nothing is sent.

        Args:
            topk_idx: expert numbers int64 or int32 [T, K]; −1 is "no expert". A duplicate counts once per rank and twice per expert.
            num_experts: E, of all ranks.

        Returns:
            num_tokens_per_rank i32[R], num_tokens_per_rdma_rank i32[RR] (None on one node), num_tokens_per_expert i32[E],
            is_token_in_rank bool[T, R], event.
        """
        checks.events(None, previous_event, async_finish, allocate_on_comm_stream)
        experts = require_int("num_experts", num_experts, 1)
        if experts > (most := self.group_size * self._local_experts_max):
            raise InvalidArgumentError(
                f"num_experts is {experts}; it must be at most {most}: "
                f"{self.group_size} ranks of max_local_experts={self._local_experts_max}"
            )
        checks.on_device(self.runtime.device, topk_idx=topk_idx)
        ids = checks.expert_ids("topk_idx", topk_idx)
        with self._holding("get_dispatch_layout"), self.runtime.ordered(previous_event, async_finish) as order:
            per_rank, per_node, per_expert, in_rank = self.runtime.layout(ids, experts)
        return per_rank, per_node if self.num_nodes > 1 else None, per_expert, in_rank, order.event

    @keywords()
    def dispatch(
        self,
        x: _Sent,
        handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[_Sent, torch.Tensor | None, torch.Tensor | None, list[int] | torch.Tensor | None, Handle | None, EventOverlap]:
        """Send each row to every rank that has one of its experts. Collective.

        Args:
            x: rows bf16 [T, H], any strides; or (rows fp8_e4m3 [T, H], scales f32 or int32 [T, S]), any strides, S the same on all ranks.
            handle: of an earlier dispatch: the same routing again; then every argument of the layout and top-k must be None.
            num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert: as `get_dispatch_layout` returned.
            topk_idx: int64 or int32 [T, K], topk_weights: f32 [T, K]; both optional.
            expert_alignment: the returned counts are rounded up to it; the real ones are `handle.real_counts`.
            num_worst_tokens: W > 0, the same on all ranks, with topk_idx: what is returned has W rows, valid ones first, recv_topk_idx −1
                behind them, other values there undefined; a combine takes W rows too. With a handle: its dispatch's, or 0.
            previous_event, async_finish, allocate_on_comm_stream: events are complete on CPU.

        Returns:
            recv_x [N, H] of x's dtype, by source rank, then source token, for FP8 (recv_x, recv_scales [N, S]) with row-major scales;
            recv_topk_idx [N, K] of local experts, −1 elsewhere;
            recv_topk_weights f32 [N, K], 0.0 where the id is −1; rows per local expert, with `num_worst_tokens` as int32 [E_l]; handle;
            event. With `handle` only recv_x and event.

        Raises:
            InvalidArgumentError: an argument cannot be used; nothing was sent. MismatchError: ranks called with different shapes.
            CapacityError: a rank receives more than its data region has room for, or W rows would. WorstTokensError: a rank was sent more
            than W rows, and kept W; on every rank, after the rows have moved. PeerError, DeadlineError: the Buffer is failed.
        """
        checks.events(config, previous_event, async_finish, allocate_on_comm_stream)
        alignment = require_int("expert_alignment", expert_alignment, 1)
        layout = {
            "num_tokens_per_rank": num_tokens_per_rank,
            "num_tokens_per_rdma_rank": num_tokens_per_rdma_rank,
            "is_token_in_rank": is_token_in_rank,
            "num_tokens_per_expert": num_tokens_per_expert,
            "topk_idx": topk_idx,
            "topk_weights": topk_weights,
        }
        checks.on_device(self.runtime.device, x=x, **layout)
        if handle is not None:
            routing = checks.handle(handle, self._identity)
            checks.worst_tokens(num_worst_tokens, routing)
            checks.absent("when handle is given, which has the routing already", **layout)
            given = checks.payload("x", x, routing.num_tokens)
            with self._calling("dispatch"), self.runtime.ordered(previous_event, async_finish, _sms(config)) as order:
                checks.handle(handle, self._identity)  # again: another thread may have called shrink meanwhile
                again = self.runtime.dispatch_again(given, routing)
            return cast(_Sent, again), None, None, None, None, order.event
        given = checks.payload("x", x)
        worst = checks.worst_tokens(num_worst_tokens, None)
        with self._calling("dispatch"):
            fresh = checks.routing(given.x.shape[0], self.node_of, layout, worst)
            with self.runtime.ordered(previous_event, async_finish, _sms(config)) as order:
                received = self.runtime.dispatch(given, fresh, alignment, self._identity)
        made = received.handle
        rows, counts = cast(_Sent, received.rows), made.returned_counts
        result = (rows, received.topk_idx, received.topk_weights, counts, made, order.event)
        if received.overflows:
            raise checks.overflow(received.overflows, made, result)
        return result

    @keywords()
    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Bring rows back to the tokens that they came from, summed over ranks in fp32 in a fixed order, unweighted. Collective.

        Args:
            x: rows bf16 [N, H] ([W, H] after `num_worst_tokens`), in the order in which the dispatch of `handle` received them.
                Any strides. H is the same on all ranks, but need not be the dispatch's. Contiguous rows inside the data region, such as the
                received tensor written over in place, are read where they lie; others are copied there first.
                Either way nobody may write to x before the call returns.
            topk_weights: f32 [N, K], summed alike.
            bias: one tensor or two, bf16 [T, H], added first.

        Returns:
            combined_x bf16 [T, H], combined_topk_weights f32 [T, K] or None, event.

        Raises:
            as `dispatch`.
        """
        checks.events(config, previous_event, async_finish, allocate_on_comm_stream)
        routing = checks.handle(handle, self._identity)
        checks.on_device(self.runtime.device, x=x, topk_weights=topk_weights, bias=bias)
        rows = checks.rows("x", x, routing.num_rows)
        weights = None
        if topk_weights is not None:
            weights = checks.tensor("topk_weights", topk_weights, (torch.float32,), (routing.num_rows, "top-k"))
            require_int("topk_weights.shape[1]", weights.shape[1], 1)
        added = checks.biases(bias, routing.num_tokens, rows.shape[1])
        with self._calling("combine"), self.runtime.ordered(previous_event, async_finish, _sms(config)) as order:
            checks.handle(handle, self._identity)  # again: another thread may have called shrink meanwhile
            combined, combined_weights = self.runtime.combine(rows, routing, weights, added)
        return combined, combined_weights, order.event

    # ---- end

    @keywords()
    def shrink(self, timeout_ms: int | None = None) -> tuple[int, ...]:
        """Agree with the other ranks on who is left, and go on among those. Collective among them; of a failed Buffer or a live one.

        Waits for every rank but those whose process has ended, that closed their Buffer, or that fell silent (no heartbeat for 5 s, or
        half of the timeout). Those that come go on if they are more than half of the ranks, or half of them with the lowest, or if everyone
        else is known to have ended, as the kernel of one host says: who is only silent may wake up, and two parts must not both go on.

        Ranks are numbered from 0 again, in the same order, and nodes likewise; so are experts, from the E of the next call. Regions and
        keys are fresh: what a stopped rank still writes reaches nobody. Handles of before are refused, tensors of before stay valid. Masks
        of the low-latency mode are clean again. For its time both the old regions and the new ones are there.

        Args:
            timeout_ms: deadline; by default the Buffer's.

        Returns:
            The number that each rank had before this call, by its number now. `members` has those of the beginning.

        Raises:
            DeadlineError: names who did not come, and says where too few did; PeerError: so many have left that no agreement can come;
            after either all may call again. ExcludedError: the others went on without this rank. CapacityError: no memory.
        """
        limit = self.runtime.timeout_ms if timeout_ms is None else require_int("timeout_ms", timeout_ms, 1, TIMEOUT_MS_MAX)
        with self._holding("shrink", (State.live, State.failed)):
            before, self._state = self._state, State.failed  # whatever ends it half-way: its rank is not where the others are
            try:
                members, runtime = self.runtime.shrink(limit)
            except BaseException as error:
                if before is State.live:
                    self._first_error = f"shrink: {type(error).__name__}: {error}"
                raise
            self.runtime = runtime
            self.rank, self.group_size = members.index(self.rank), len(members)
            self.members = tuple(self.members[member] for member in members)
            self._identity = Identity(self._identity.number, self.rank, self._identity.shrinks + 1, self._identity.resets)
            self._state, self._first_error = State.live, ""
        return members

    @keywords()
    def destroy(self) -> None:
        """Release everything. Collective, and may be called again. Tensors that an operation returned stay valid.

        Waits for the other ranks only briefly: they may destroy their Buffers in another order. Of a failed Buffer it waits for nobody.
        Waits for a call of another thread to end, which its deadline does; if it does not, raises `DeadlineError`. Within a call of this
        thread (from a signal handler) it returns at once, and the Buffer is released when that call has ended.
        """
        checks.not_forked(os.getpid(), self._pid)
        with self._locked("destroy"):
            was, self._state = self._state, State.destroyed
            if was is not State.destroyed and not self._within:
                self.runtime.close(linger=was is State.live)

    @contextmanager
    def _calling(self, operation: str) -> Iterator[None]:
        """One call at a time; what ends a call half-way fails the Buffer, for rows of that call may still arrive."""
        with self._holding(operation):
            try:
                yield
            except (*checks.UNSENT, StateError, ExcludedError):  # one that a core raises comes before it sends, or ends a call for good
                raise
            except BaseException as error:
                why = self.runtime.excluded() if isinstance(error, PeerError | DeadlineError | TransferError) else None
                said = error if why is None else why
                if self._state is State.live:
                    self._state = State.failed
                    self._first_error = f"{operation}: {type(said).__name__}: {said}"
                if why is not None:
                    raise why from error
                raise

    @contextmanager
    def _holding(self, operation: str, states: tuple[State, ...] = (State.live,)) -> Iterator[None]:
        """The lock, of a Buffer in one of the states. Whatever fails meanwhile is the caller's alone: nothing was sent."""
        checks.not_forked(os.getpid(), self._pid)
        with self._locked(operation):
            if self._within:
                raise StateError(
                    f"rank {self.rank}: {operation} was called within {self._within} of the same thread, as a signal handler or a "
                    "finalizer does; only destroy works there"
                )
            self._require(operation, states)
            self._within = operation
            try:
                yield
            finally:
                self._within = ""
                if self._state is State.destroyed:  # from within
                    self.runtime.close(linger=False)

    @contextmanager
    def _locked(self, operation: str) -> Iterator[None]:
        patience_ms = 2 * self.runtime.timeout_ms
        if not self._lock.acquire(timeout=patience_ms / 1000):
            raise DeadlineError(f"rank {self.rank}: {operation} waited {patience_ms} ms for the call of another thread to end")
        try:
            yield
        finally:
            self._lock.release()

    def _require(self, operation: str, states: tuple[State, ...]) -> None:
        if self._state in states:
            return
        if self._state is State.destroyed:
            raise StateError(f"rank {self.rank}: {operation} on a Buffer that was destroyed: make a new one")
        raise StateError(
            f"rank {self.rank}: {operation} on a Buffer that failed before; shrink it, on every rank that is left (on CUDA tensors reset "
            f"it, on every rank), or destroy it and make a new one. The first error was {self._first_error}"
        )


def _sms(config: Config | None) -> int:
    return (Buffer.num_sms if config is None else config.num_sms) or Config.num_sms
