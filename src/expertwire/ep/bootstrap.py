"""How the ranks of a Buffer find each other: settings compared, nodes proved, addresses and descriptors passed.

Only `all_gather_object` of the group is needed; gloo is enough, whose messages also tell who has not come. Nothing after construction uses
the group: its store may die with rank 0. Rank and size come from the group alone. LOCAL_RANK, RANK and WORLD_SIZE are never read: under
node-local launchers every worker may inherit `LOCAL_RANK=0`, and a group may be smaller than the world.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

import expertwire
from expertwire.ep.layout import check_node_table
from expertwire.ep.neighbours import STEP_S, Door, Neighbour
from expertwire.ep.processes import Process, own_process
from expertwire.errors import (
    CapacityError,
    DeadlineError,
    InvalidArgumentError,
    InvalidTypeError,
    MismatchError,
    PeerError,
    StateError,
    UnavailableError,
)
from expertwire.fabric.config import Settings
from expertwire.fabric.discover import boot_id, choose_provider, nodes_from_pairs

if TYPE_CHECKING:
    from expertwire.fabric.native import Context

Value = TypeVar("Value")
_COMING_S = 1.0  # for the others to come to a step that one has ended in: the first who notices would name all that are slower
_LOOK_S = 0.01
_ROLL_TAG = 0x45_57_52  # of our own: a caller's messages over the same group have others


@dataclass(frozen=True)
class Launch:
    """Who this rank is, and one collective: `all_gather(object)` gives each rank's object, by rank. After `until_s` on the monotonic clock
    nobody waits any more."""

    rank: int
    size: int
    all_gather: Callable[[Any], list[Any]]
    until_s: float = math.inf


@dataclass(frozen=True)
class Wiring:
    """A started context: every rank reachable, the memory of node neighbours mapped."""

    context: Context
    node_of: tuple[int, ...]
    provider: str
    processes: tuple[Process, ...]  # of each rank


@dataclass(frozen=True)
class _Hello:
    facts: dict[str, str]
    table: tuple[int, ...] | None
    neighbour: Neighbour


@dataclass(frozen=True)
class Memory:
    """What a rank is about to allocate, and how much it may, as it stood before anyone allocated."""

    needed_bytes: int
    available_bytes: int
    pool: tuple[object, ...]  # ranks with the same one take from the same memory
    source: str  # where the limit is written


def launch_of(group: object, comm: object = None, timeout_ms: int = 100_000) -> Launch:
    """The launch behind a torch.distributed group, an mpi4py communicator, or a `Launch` itself. A gloo group waits for `timeout_ms`."""
    if isinstance(group, Launch):
        if not 0 <= group.rank < group.size:
            raise InvalidArgumentError(f"group has rank {group.rank} of {group.size}; the rank must be in [0, {group.size})")
        return group
    if comm is not None:
        for name in ("Get_rank", "Get_size", "allgather"):
            if not callable(getattr(comm, name, None)):
                raise InvalidTypeError(f"comm is a {type(comm).__name__} without {name}(); it must be an mpi4py communicator")
        communicator: Any = comm
        return Launch(communicator.Get_rank(), communicator.Get_size(), communicator.allgather)
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidTypeError(f"group is a {type(group).__name__}; it must be a torch.distributed ProcessGroup (or give comm)")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise InvalidArgumentError("group does not have this process as a member: only its members can make a Buffer over it")

    def all_gather(mine: Any) -> list[Any]:
        begin = time.monotonic()
        roll = _Roll(group, rank, size) if dist.get_backend(group) == "gloo" else None
        try:
            answers = _gather(group, size, mine, timeout_ms)
            if roll is not None:
                roll.close(timeout_ms)
            return answers
        except RuntimeError as error:
            late = time.monotonic() - begin >= timeout_ms / 1000
            absent = [] if roll is None else roll.absent(0 if late else _COMING_S)
            who = f"ranks {absent} have" if len(absent) > 1 else f"rank {absent[0]} has" if absent else "a rank has"
            if late:
                raise DeadlineError(
                    f"rank {rank}: making a Buffer, {who} not come to it within {timeout_ms} ms; "
                    f"it is elsewhere, or a rank has ended and another one that noticed gave up: {error}"
                ) from error
            raise PeerError(
                f"rank {rank}: making a Buffer, {who} not come to it, and the group failed, as it does when one of its ranks ends: {error}",
                absent[0] if len(absent) == 1 else -1,
            ) from error

    return Launch(rank, size, all_gather)


class _Roll:
    """Who has come to a step: beside the collective, which only knows that somebody has not, each rank says so to each."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._words = torch.zeros(size, dtype=torch.uint8, device="cpu")
        self._words[rank] = 1
        self._under_way: list[dist.Work | None] = []
        word = torch.ones(1, dtype=torch.uint8, device="cpu")
        for other in range(size):
            if other != rank:
                name = dist.get_global_rank(group, other)
                with suppress(RuntimeError):  # it has ended, and has not said anything
                    self._under_way.append(dist.irecv(self._words[other : other + 1], name, group, _ROLL_TAG))
                    self._under_way.append(dist.isend(word, name, group, _ROLL_TAG))

    def close(self, timeout_ms: int) -> None:
        """All have come: what they said arrives, if it has not yet."""
        for work in self._under_way:
            assert work is not None  # as it would be in a process that is no member
            work.wait(timedelta(milliseconds=timeout_ms))

    def absent(self, coming_s: float) -> list[int]:
        """Those that were not heard, once only one is left of them, or that time has passed. Looks only: a receive whose wait runs out of
        time ends the connections of the whole group."""
        until_s = time.monotonic() + coming_s
        while True:
            missing = [rank for rank, word in enumerate(self._words.tolist()) if not word]
            if len(missing) <= 1 or time.monotonic() >= until_s:
                return missing
            time.sleep(_LOOK_S)


def _gather(group: dist.ProcessGroup, size: int, mine: Any, timeout_ms: int) -> list[Any]:
    """Each rank's object. A gloo group waits as long as it was made to, half an hour by default: here it waits for our deadline."""
    answers: list[Any] = [None] * size
    if dist.get_backend(group) != "gloo":
        dist.all_gather_object(answers, mine, group=group)
        return answers
    within = timedelta(milliseconds=timeout_ms)
    data = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([data.numel()], device="cpu"), group=group, async_op=True).wait(within)
    most = max(int(length) for length in lengths)
    padded = torch.nn.functional.pad(data, (0, most - data.numel()))
    received = [torch.zeros(most, dtype=torch.uint8, device="cpu") for _ in range(size)]
    dist.all_gather(received, padded, group=group, async_op=True).wait(within)
    return [pickle.loads(bytes(one[: int(length)].numpy())) for one, length in zip(received, lengths, strict=True)]


def settings_for(provider: str | None, timeout_ms: int | None, sync_writes: bool | None = None) -> Settings:
    """The environment's settings, with what the caller gave in their place."""
    settings = Settings.from_environment()
    if provider is not None:
        if not isinstance(provider, str):
            raise InvalidTypeError(f"provider must be a str, got {provider!r}")
        settings = dataclasses.replace(settings, provider=provider)
    if timeout_ms is not None:
        settings = dataclasses.replace(settings, timeout_ms=timeout_ms)
    if sync_writes is not None:
        settings = dataclasses.replace(settings, sync_writes=bool(sync_writes))
    if settings.hard_timeout() < settings.timeout_ms:
        raise InvalidArgumentError(
            f"timeout_ms is {settings.timeout_ms}; it must be at most EXPERTWIRE_HARD_TIMEOUT_MS, which is {settings.hard_timeout_ms}"
        )
    return settings


def together(launch: Launch, work: Callable[[], Value]) -> list[Value]:
    """Each rank's result of `work`. When it failed on any rank it fails on all, instead of leaving the others to wait."""
    result: Value | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    answers = launch.all_gather((None if error is None else f"{type(error).__name__}: {error}", result))
    if isinstance(error, OSError):  # no descriptor, no memory, no file of a library
        raise UnavailableError(f"rank {launch.rank}: no Buffer, because this rank could not make its part of it: {error}") from error
    if error is not None:
        raise error
    for rank, (text, _) in enumerate(answers):
        if text is not None:
            raise StateError(f"rank {launch.rank}: no Buffer, because rank {rank} could not make its part of it: {text}")
    return [value for _, value in answers]


def agree(rank: int, facts: Sequence[Mapping[str, str]]) -> None:
    """Raises `MismatchError` when a rank's facts are not those of rank 0."""
    for other, theirs in enumerate(facts):
        for key in {**facts[0], **theirs}:
            ours, value = facts[0].get(key, "absent"), theirs.get(key, "absent")
            if ours != value:
                raise MismatchError(
                    f"rank {rank}: ranks disagree on {key}: rank 0 has {ours!r}, rank {other} has {value!r}; give all ranks the same"
                )


def memory_of(needed_bytes: int) -> Memory:
    """This rank's part of what `check_memory` compares."""
    from expertwire.fabric.native import memory_available

    available, source = memory_available()
    try:
        container = os.stat("/proc/self/ns/cgroup").st_ino  # the same path is another group in another container
    except OSError:
        container = 0
    return Memory(needed_bytes, available, (boot_id(), container, source), source)


def check_memory(rank: int, memories: Sequence[Memory]) -> None:
    """Raises `CapacityError` where the ranks that take from one memory ask for more than it has. Each by itself could be served, all at
    once they would not get an error: the kernel kills a process, perhaps somebody else's."""
    for pool in dict.fromkeys(memory.pool for memory in memories):
        sharing = [place for place, memory in enumerate(memories) if memory.pool == pool]
        needed = sum(memories[place].needed_bytes for place in sharing)
        available = min(memories[place].available_bytes for place in sharing)
        if needed > available:
            most = max(sharing, key=lambda place: memories[place].needed_bytes)
            raise CapacityError(
                f"rank {rank}: no Buffer, because the {len(sharing)} ranks that share one memory (ranks {sharing}) need {needed} bytes for "
                f"their regions, rank {most} the most with {memories[most].needed_bytes}, and {available} are available "
                f"({memories[sharing[0]].source}); give a smaller num_nvl_bytes or num_rdma_bytes, or free memory"
            )


def _given_table(launch: Launch, settings: Settings, node_of: Sequence[object] | None) -> tuple[int, ...] | None:
    """The table that the caller, or else the environment, gave; None: to be proved."""
    if node_of is not None:
        return check_node_table("node_of", node_of, launch.size)
    if settings.node_of:
        return check_node_table("EXPERTWIRE_NODE_OF", settings.node_of, launch.size)
    if settings.provider not in ("", "local"):
        return tuple(range(launch.size))  # a provider by name turns the same-host path off
    return None


def _proved_nodes(
    launch: Launch, door: Door, step_ends: Callable[[], float], others: Sequence[Neighbour], table: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Nodes by mapping a probe region for each pair; a table that was given must be proved where it puts ranks together."""
    me = others[launch.rank]

    def prove() -> list[bool]:
        wanted = [
            peer.rank < launch.rank and peer.process.boot == me.process.boot and (table is None or table[peer.rank] == table[launch.rank])
            for peer in others
        ]
        until_s = step_ends()
        return [want and door.prove(peer, until_s) for want, peer in zip(wanted, others, strict=True)]

    rows = together(launch, prove)
    pairs = [[i == j or rows[max(i, j)][min(i, j)] for j in range(launch.size)] for i in range(launch.size)]
    if table is None:
        return tuple(nodes_from_pairs(pairs))
    for i in range(launch.size):
        for j in range(i):
            if table[i] == table[j] and not pairs[i][j]:
                raise InvalidArgumentError(
                    f"node_of puts ranks {j} and {i} in node {table[i]}, but rank {i} cannot map the memory of rank {j}: "
                    "give ranks that do not share memory different nodes"
                )
    return table


def connect(
    launch: Launch,
    settings: Settings,
    node_of: Sequence[object] | None,
    facts: Mapping[str, str],
    build: Callable[[tuple[int, ...], Settings, int], Context],
    needed_bytes: Callable[[tuple[int, ...]], int],
    patience_s: float = STEP_S,
) -> Wiring:
    """Compare settings and facts, prove nodes, let `build(node_of, settings, hosts)` make a context with its regions, and wire it.
    `needed_bytes(node_of)` says first how much that will allocate. `patience_s`: how long the ranks of the node have to answer
    at their doors, all of them together.

    Collective. A failure on any rank is raised on all of them.
    """
    patience_s = min(patience_s, settings.timeout_ms / 1000)

    def step_ends() -> float:
        return min(time.monotonic() + patience_s, launch.until_s)

    with ExitStack() as held:
        doors: list[Door] = []

        def open_door() -> Door:
            doors.append(held.enter_context(Door(patience_s)))
            return doors[0]

        table, neighbours = _meet(launch, open_door, settings, node_of, facts)
        door = doors[0]
        nodes = _proved_nodes(launch, door, step_ends, neighbours, table)
        hosts = len({one.process.boot for one in neighbours})
        plans = together(launch, lambda: (_choose_provider(settings, nodes, hosts), memory_of(needed_bytes(nodes))))
        providers = [name for name, _ in plans]
        agree(launch.rank, [{"provider": name} for name in providers])
        check_memory(launch.rank, [memory for _, memory in plans])
        chosen = dataclasses.replace(settings, provider=providers[launch.rank])
        made: list[Context] = []

        def build_mine() -> bytes:
            made.append(build(nodes, chosen, hosts))
            return bytes(made[0].blob())

        try:
            blobs = together(launch, build_mine)
            context = made[0]
            door.open_regions({name: context.region_fd(context.region(name)) for name in context.region_names()})
            together(launch, lambda: _reach(launch.rank, context, blobs, door, step_ends(), neighbours, nodes))
            together(launch, context.start)  # nobody sends before all have started
        except BaseException:
            for context in made:
                context.close(0)
            raise
        return Wiring(context, nodes, chosen.provider, tuple(one.process for one in neighbours))


def _meet(
    launch: Launch, open_door: Callable[[], Door], settings: Settings, node_of: Sequence[object] | None, facts: Mapping[str, str]
) -> tuple[tuple[int, ...] | None, list[Neighbour]]:
    """The first exchange: everything that must agree does. Returns the node table given, if any, and everyone's door, this one's opened."""

    def hello() -> _Hello:
        table = _given_table(launch, settings, node_of)
        mine = {
            "version": expertwire.__version__,
            "size of the group": str(launch.size),
            "node table": str(table),
            **settings.exchanged(),
            **facts,
        }
        door = open_door()
        return _Hello(mine, table, Neighbour(launch.rank, own_process(boot_id()), door.name, door.secret))

    hellos = together(launch, hello)
    agree(launch.rank, [one.facts for one in hellos])
    for place, one in enumerate(hellos):
        if one.neighbour.rank != place:
            raise MismatchError(f"the group has rank {one.neighbour.rank} at place {place}: each rank must be there once, in order")
    return hellos[launch.rank].table, [one.neighbour for one in hellos]


def _choose_provider(settings: Settings, nodes: tuple[int, ...], hosts: int) -> str:
    """The provider named, else `local` where one node has all ranks, else the best that this machine has."""
    one_node = not settings.provider and max(nodes) == 0
    provider = "local" if one_node else choose_provider(settings)
    if provider == "local" and hosts > 1:
        raise UnavailableError(
            f"the ranks are on {hosts} hosts and the provider is 'local', which serves one host: "
            "install libfabric (`expertwire doctor` says how) or name another provider"
        )
    return provider


def _reach(
    rank: int,
    context: Context,
    blobs: Sequence[bytes],
    door: Door,
    until_s: float,
    neighbours: Sequence[Neighbour],
    nodes: tuple[int, ...],
) -> None:
    for peer, blob in enumerate(blobs):
        if peer == rank:
            continue
        context.add_peer(peer, blob)
        if nodes[peer] == nodes[rank]:
            with door.regions_of(neighbours[peer], until_s) as descriptors:
                for name, descriptor in descriptors.items():
                    context.map_peer(peer, name, descriptor)
