"""Two agents of one process, and memory of which some may be taken back."""

from __future__ import annotations

import numpy

from expertwire.errors import ExpertwireError
from expertwire.transfer import Agent

NBYTES = 1 << 20
BAD_KEY = "with agent 'b' failed: bad_key"


class Two:
    """Agents a and b of this process, each with memory; `card`: of b while all of it was registered."""

    def __init__(self, a: Agent, b: Agent, nbytes: int = NBYTES) -> None:
        self.a, self.b = a, b
        self.here, self.there = numpy.full(nbytes, 7, dtype=numpy.uint8), numpy.full(nbytes, 1, dtype=numpy.uint8)
        self.always = numpy.zeros(4096, dtype=numpy.uint8)
        a.register(rows(self.here), "DRAM")
        b.register(rows(self.there), "DRAM")
        b.register(rows(self.always), "DRAM")
        self.card = b.card()

    def move(self, operation: str, there: numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]], nbytes: int = 4096) -> str:
        """ "", or what the transfer says."""
        remote = [(int(there.ctypes.data), nbytes, 0)]
        transfer = self.a.initialize(operation, [(int(self.here.ctypes.data), nbytes, 0)], remote, "b", kind="DRAM")
        transfer.post()
        try:
            transfer.wait()
        except ExpertwireError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            transfer.release()
        return ""

    def only_its_own_fails(self) -> None:
        for nbytes in (4096, NBYTES):  # over both lanes
            for operation in ("WRITE", "READ"):
                said = self.move(operation, self.there, nbytes)
                assert said.startswith("TransferError: "), said
                assert BAD_KEY in said, said
        assert numpy.all(self.there == 1)
        assert numpy.all(self.here == 7)
        self.a.connect("b")
        assert not self.move("WRITE", self.always), "b is well, and is reached"
        assert numpy.all(self.always == 7)


def rows(memory: numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]) -> list[tuple[int, int, int]]:
    return [(int(memory.ctypes.data), memory.nbytes, 0)]
