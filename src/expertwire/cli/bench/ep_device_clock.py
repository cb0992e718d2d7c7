"""How `bench ep --device cuda` times work among ranks, what bounds it, and what a captured graph launches.

Times are of the slowest rank, in µs. Back to back: so many calls between two events of the stream, by their number. One at a time: after
a barrier, by two events around the call, and by the host's clock from the call until the device has ended.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Work = Callable[[], object]
WARMUP = 3
REPEATS = 20  # of a figure back to back
ROUNDS = 3  # of such; the median counts
COPY_BYTES = 256 << 20
NODES = {0: "kernel", 1: "memcpy", 2: "memset"}  # CUgraphNodeType


@dataclass(frozen=True)
class Times:
    """µs of the slowest rank: the median, the least and the most of the rounds."""

    us: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: list[float]) -> Times:
        """From one figure per round."""
        return cls(statistics.median(samples), min(samples), max(samples))


class Clock:
    """Times calls on this rank's device; every method is collective. On "cpu" calls end when they return, and the host's clock serves."""

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        self.rank, self.ranks, self.device = rank, ranks, device
        self.on_gpu = device.type == "cuda"

    def gather(self, mine: Any) -> list[Any]:
        """Everybody's, by rank."""
        answers: list[Any] = [None] * self.ranks
        dist.all_gather_object(answers, mine)
        return answers

    def together(self) -> None:
        """The device has ended, here and everywhere."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        dist.barrier()

    def back_to_back(self, works: dict[str, Work], rounds: int = ROUNDS, repeats: int = REPEATS) -> dict[str, Times]:
        """Each work `repeats` times in a row, works turn about."""
        samples: dict[str, list[float]] = {name: [] for name in works}
        for work in works.values():
            for _ in range(WARMUP):
                work()
            self.together()
        for number in range(rounds):
            for name in list(works)[:: -1 if number % 2 else 1]:
                self.together()
                samples[name].append(max(self.gather(self._row(works[name], repeats))))
        return {name: Times.of(found) for name, found in samples.items()}

    def _row(self, work: Work, repeats: int) -> float:
        if not self.on_gpu:
            begun = time.perf_counter()
            for _ in range(repeats):
                work()
            return (time.perf_counter() - begun) * 1e6 / repeats
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        work()  # what the first call of a row finds differs from the others
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end) * 1000 / repeats)

    def one_at_a_time(self, works: dict[str, Work], rounds: int) -> dict[str, dict[str, Times]]:
        """By work: "event" and "host"."""
        samples: dict[str, dict[str, list[float]]] = {name: {"event": [], "host": []} for name in works}
        for number in range(rounds):
            for name in list(works)[:: -1 if number % 2 else 1]:
                self.together()
                found = self.gather(self._one(works[name]))
                samples[name]["event"].append(max(event for event, _ in found))
                samples[name]["host"].append(max(host for _, host in found))
        return {name: {timing: Times.of(times) for timing, times in both.items()} for name, both in samples.items()}

    def _one(self, work: Work) -> tuple[float, float]:
        if not self.on_gpu:
            begun = time.perf_counter()
            work()
            took = (time.perf_counter() - begun) * 1e6
            return took, took
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun = time.perf_counter()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize(self.device)
        return float(begin.elapsed_time(end) * 1000), (time.perf_counter() - begun) * 1e6

    def capture(self, work: Work) -> tuple[torch.cuda.CUDAGraph, Counter[str]]:
        """A graph of the work, which has been called before, and how many nodes it has of each kind."""
        self.together()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            work()
        nodes = count_nodes(graph.raw_cuda_graph())
        graph.instantiate()
        self.together()
        return graph, nodes

    # ---- ceilings

    def card_ceiling(self) -> float:
        """Bytes that a card reads and writes in a µs while every rank on it copies from its own memory to its own. 0 on a host."""
        if not self.on_gpu:
            return 0.0
        source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        times = self.back_to_back({"copy": lambda: target.copy_(source)}, repeats=10)["copy"]
        on_card = max(Counter(self.cards()).values())
        return 2 * COPY_BYTES * on_card / times.us

    def peer_ceiling(self) -> float:
        """Bytes that go one way between two cards in a µs while every rank copies to one on the next card. 0: one card."""
        cards = self.cards()
        kinds = sorted(set(cards))
        if len(kinds) < 2:
            return 0.0
        from expertwire.ep.bootstrap import Launch
        from expertwire.ep.cuda.symmetric import allocate

        memory = allocate(Launch(self.rank, self.ranks, self.gather), 2 * COPY_BYTES, self.device)
        after = kinds[(kinds.index(cards[self.rank]) + 1) % len(kinds)]
        there = [rank for rank, card in enumerate(cards) if card == after]
        peer = there[cards[: self.rank].count(cards[self.rank]) % len(there)]
        driver = _driver()

        def copy() -> None:
            stream = torch.cuda.current_stream(self.device).cuda_stream
            status = driver.cuMemcpyDtoDAsync_v2(memory.addresses[peer] + COPY_BYTES, memory.address, COPY_BYTES, stream)
            assert status == 0, f"cuMemcpyDtoDAsync: CUDA driver error {status}"

        times = self.back_to_back({"copy": copy}, repeats=10)["copy"]
        self.together()
        memory.unmap()
        self.together()
        return COPY_BYTES * max(Counter(cards).values()) / times.us

    def cards(self) -> list[str]:
        """Which GPU each rank is on."""
        return self.gather(str(torch.cuda.get_device_properties(self.device).uuid) if self.on_gpu else "host")


def count_nodes(graph: int) -> Counter[str]:
    """What a CUgraph launches, by kind."""
    driver = _driver()
    count = ctypes.c_size_t()
    status = driver.cuGraphGetNodes(graph, None, ctypes.byref(count))
    assert status == 0, f"cuGraphGetNodes: CUDA driver error {status}"
    nodes = (ctypes.c_void_p * count.value)()
    if count.value:
        driver.cuGraphGetNodes(graph, nodes, ctypes.byref(count))
    found: Counter[str] = Counter()
    for node in nodes:
        kind = ctypes.c_int()
        driver.cuGraphNodeGetType(node, ctypes.byref(kind))
        found[NODES.get(kind.value, "other")] += 1
    return found


def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuGraphGetNodes.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t))
    library.cuGraphNodeGetType.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
    library.cuMemcpyDtoDAsync_v2.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    return library
