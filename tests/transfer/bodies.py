"""What agents do in their processes."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import numpy

from expertwire.errors import ExpertwireError
from expertwire.transfer import Card, Descriptors, Transfer, TransferState
from transfer.world import Here

SLOT = 4096
WAIT_S = 20.0
END_BYTES = 2 << 20  # one transfer that takes the bulk lane


def register(here: Here) -> Card:
    """The whole arena; the card."""
    here.kept["memory"] = here.agent.register([(here.base, len(here.arena), 0)], "DRAM")
    card: Card = here.agent.card()
    return card


def add(here: Here, card: Card) -> str:
    name: str = here.agent.add_remote(card)
    return name


def card_of(here: Here) -> Card:
    card: Card = here.agent.card()
    return card


def base_of(here: Here) -> int:
    return here.base


def fill(here: Here, epoch: int) -> None:
    here.fill(epoch)


def clear(here: Here) -> None:
    here.arena[:] = 0


def scattered(base: int, count: int, nbytes: int, step: int) -> numpy.ndarray[Any, Any]:
    """N × 3: pieces that are nobody's neighbours."""
    rows = numpy.zeros((count, 3), dtype=numpy.uint64)
    rows[:, 0] = base + numpy.arange(count, dtype=numpy.uint64) * numpy.uint64(step)
    rows[:, 1] = nbytes
    return rows


def prepare(here: Here, name: str, base: int, count: int, nbytes: int) -> None:
    """Both sides, under `name`: piece i here goes with piece count - 1 - i there, where pieces stand 16 bytes farther apart."""
    here.kept["local"] = here.agent.prepare("", scattered(here.base, count, nbytes, nbytes + 16), "DRAM")
    here.kept["remote"] = here.agent.prepare(name, scattered(base, count, nbytes, nbytes + 32)[::-1], "DRAM")


def place_there(count: int, nbytes: int, index: int) -> int:
    return (count - 1 - index) * (nbytes + 32)


def move(here: Here, operation: str, epoch: int, notification: bytes = b"") -> tuple[int, int, str]:
    """All of what is prepared, in one transfer of fresh bytes: (descriptors, runs, state)."""
    if operation == "WRITE":
        here.fill(epoch)
    transfer = here.agent.make(operation, here.kept["local"], None, here.kept["remote"], None, notification)
    here.agent.post(transfer)
    transfer.wait()
    transfer.release()
    return transfer.descriptor_count, transfer.run_count, transfer.state().value


def take(here: Here, count: int) -> dict[str, list[bytes]]:
    """Notifications, once there are so many of them."""
    found: dict[str, list[bytes]] = {}
    until = time.monotonic() + WAIT_S
    while sum(map(len, found.values())) < count:
        assert time.monotonic() < until, f"of {count} notifications only {found} have come"
        for name, payloads in here.agent.notifications().items():
            found.setdefault(name, []).extend(payloads)
    return found


def check_written(here: Here, source: int, epoch: int, count: int, nbytes: int) -> list[str]:
    wrong = (here.holds(place_there(count, nbytes, i), nbytes, source, epoch, i * (nbytes + 16)) for i in range(count))
    return [each for each in wrong if each]


def check_read(here: Here, source: int, epoch: int, count: int, nbytes: int) -> list[str]:
    wrong = (here.holds(i * (nbytes + 16), nbytes, source, epoch, place_there(count, nbytes, i)) for i in range(count))
    return [each for each in wrong if each]


def written_with_word(here: Here, source: int, epoch: int, count: int, nbytes: int) -> tuple[dict[str, list[bytes]], list[str]]:
    """The notification of a transfer, and what of its data was not there when it came."""
    found = take(here, 1)
    return found, check_written(here, source, epoch, count, nbytes)


def say(here: Here, name: str, *payloads: bytes) -> None:
    for payload in payloads:
        here.agent.notify(name, payload)


def forms(here: Here, name: str, base: int) -> int:
    """The same four pieces by tuples, arrays, tensors, and prepared lists by index; how many transfers were made."""
    import torch  # here alone: it takes seconds, and few of these processes need it

    agent, nbytes = here.agent, 1024
    tensors = [torch.from_numpy(here.arena[i * nbytes : (i + 1) * nbytes]) for i in range(4)]
    here_rows = [(here.base + i * nbytes, nbytes, 0) for i in range(4)]
    there_rows = [(base + i * nbytes, nbytes, 0) for i in range(4)]
    transfers = [
        agent.initialize("WRITE", here_rows, there_rows, name, kind="DRAM"),
        agent.initialize("WRITE", tensors, numpy.array(there_rows, dtype=numpy.int64)[:, :], name, kind="DRAM"),
        agent.initialize("READ", Descriptors.of(tensors), Descriptors.of(there_rows, "DRAM"), name),
        agent.make("READ", agent.prepare("", tensors), torch.tensor([3, 1]), agent.prepare(name, there_rows, "cpu"), numpy.array([3, 1])),
        agent.make("WRITE", agent.prepare("", tensors), 2, agent.prepare(name, there_rows, "DRAM"), [2]),
        agent.make("WRITE", agent.prepare("", tensors), None, agent.prepare(name, there_rows, "DRAM"), None, merge=False),
        agent.initialize(
            "WRITE",
            numpy.array([(here.base, 64, 0, nbytes, 4), (here.base, 64, 0, 64, 2)], dtype=numpy.uint64),
            numpy.array([(base + 8192, 64, 0, 128, 6)], dtype=numpy.uint64),
            name,
            kind="DRAM",
        ),
    ]
    assert [each.run_count for each in transfers] == [1, 1, 1, 2, 1, 4, 6]
    for transfer in transfers:
        agent.post(transfer)
        transfer.wait()
        assert transfer.check() is transfer.state() is TransferState.DONE
        assert transfer.ended_ns is not None
        assert transfer.ended_ns >= transfer.posted_ns > 0
        transfer.release()
    return len(transfers)


def outstanding(here: Here, epoch: int, count: int, nbytes: int) -> list[str]:
    """`count` transfers of one piece each, all on their way at once, each with its notification; what did not end well."""
    here.fill(epoch)
    transfers = here.kept.setdefault("transfers", [])
    if not transfers:
        for i in range(count):
            transfers.append(here.agent.make("WRITE", here.kept["local"], [i], here.kept["remote"], [i]))
    for i, transfer in enumerate(transfers):
        here.agent.post(transfer, b"%d/%d" % (epoch, i))
    until = time.monotonic() + WAIT_S
    while any(transfer.check() is not TransferState.DONE for transfer in transfers):
        assert time.monotonic() < until, transfers
    return [str(each) for each in transfers if each.error]


def again(here: Here, rounds: int) -> None:
    """One prepared transfer, posted again and again with other bytes, each round answered before the next."""
    transfer = here.agent.make("WRITE", here.kept["local"], [0, 1], here.kept["remote"], [0, 1], b"first")
    for epoch in range(1, rounds + 1):
        here.fill(epoch, 20_000)
        here.agent.post(transfer, b"%d" % epoch)
        transfer.wait()
        assert take(here, 1) == {"b": [b"seen %d" % epoch]}
    transfer.release()


def answer_again(here: Here, rounds: int, count: int, nbytes: int) -> list[str]:
    wrong = []
    for epoch in range(1, rounds + 1):
        assert take(here, 1) == {"a": [b"%d" % epoch]}
        wrong += [here.holds(place_there(count, nbytes, i), nbytes, 0, epoch, i * (nbytes + 16)) for i in (0, 1)]
        here.agent.notify("a", b"seen %d" % epoch)
    return [each for each in wrong if each]


def many(here: Here, name: str, base: int, count: int) -> float:
    """One transfer of so many small pieces, none of them neighbours; ms inside the post."""
    nbytes = 64
    local = here.agent.prepare("", scattered(here.base, count, nbytes, nbytes + 8), "DRAM")
    remote = here.agent.prepare(name, scattered(base, count, nbytes, nbytes + 16), "DRAM")
    here.fill(9)
    transfer = here.agent.make("WRITE", local, None, remote, None)
    assert transfer.run_count == count
    transfer.post()
    transfer.wait()
    return float(transfer.post_duration_ns / 1e6)


def check_many(here: Here, count: int) -> list[str]:
    nbytes = 64
    wrong = (here.holds(i * (nbytes + 16), nbytes, 0, 9, i * (nbytes + 8)) for i in range(0, count, 97))
    return [each for each in wrong if each]


def awaited(here: Here) -> list[str]:
    """Transfers awaited side by side in one event loop."""

    async def one(index: int) -> str:
        transfer: Transfer = here.agent.make("READ", here.kept["local"], [index], here.kept["remote"], [index])
        transfer.post()
        await transfer
        state = transfer.state()
        transfer.release()
        return str(state.value)

    async def every() -> list[str]:
        return await asyncio.gather(*(one(index) for index in range(8)))

    return asyncio.run(every())


def refused(here: Here, name: str, base: int) -> list[str]:
    """Class and message of everything that is refused here, in order."""
    agent = here.agent
    local = agent.prepare("", [(here.base, 64, 0), (here.base + 64, 32, 0)], "DRAM")
    remote = agent.prepare(name, [(base, 64, 0), (base + 64, 32, 0)], "DRAM")
    fresh = agent.make("WRITE", local, [0], remote, [0])
    released = agent.make("WRITE", local, [0], remote, [0])
    released.release()
    gone = agent.prepare("", [(here.base, 64, 0)], "DRAM")
    gone.release()
    calls = [
        lambda: agent.prepare("nobody", [(base, 64, 0)], "DRAM"),
        lambda: agent.prepare("", [(here.base + len(here.arena) - 4, 8, 0)], "DRAM"),
        lambda: agent.prepare(name, [(base - 8, 8, 0)], "DRAM"),
        lambda: agent.prepare("", [(here.base, 64, 0)], "VRAM"),
        lambda: agent.register([(here.base, 64, 0)], "VRAM"),
        lambda: agent.make("COPY", local, [0], remote, [0]),
        lambda: agent.make("WRITE", local, [0, 1], remote, [0]),
        lambda: agent.make("WRITE", local, [0], remote, [1]),
        lambda: agent.make("WRITE", local, [2], remote, [0]),
        lambda: agent.make("WRITE", remote, [0], remote, [0]),
        lambda: agent.make("WRITE", local, [0], local, [0]),
        lambda: agent.make("WRITE", gone, [0], remote, [0]),
        lambda: agent.make("WRITE", local, [0], remote, [0], bytes(9000)),
        lambda: fresh.check(),
        lambda: released.post(),
        lambda: agent.deregister([(here.base, 64, 0)], "DRAM"),
        lambda: agent.add_remote(agent.card()),
        lambda: agent.notify(name, bytes(9000)),
        lambda: agent.remove_remote("nobody"),
    ]
    found = []
    for call in calls:
        try:
            call()
            found.append("nothing")
        except ExpertwireError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def post_only(here: Here, name: str, base: int) -> None:
    """A bulk transfer is begun and kept."""
    transfer = here.agent.initialize("WRITE", [(here.base, END_BYTES, 0)], [(base, END_BYTES, 0)], name, b"all", kind="DRAM")
    transfer.post()
    here.kept["bulk"] = transfer


def bulk_is(here: Here) -> tuple[str, bool]:
    transfer = here.kept["bulk"]
    return transfer.check().value, transfer.stalled


def bulk_call(here: Here, what: str) -> str:
    """What it says."""
    try:
        getattr(here.kept["bulk"], what)()
    except ExpertwireError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def bulk_ends(here: Here) -> tuple[str, str]:
    """(state, error) once it has ended, which is looked for with nothing but check()."""
    transfer, seen = here.kept["bulk"], ""
    until = time.monotonic() + WAIT_S
    while transfer.state() is TransferState.ACTIVE:
        assert time.monotonic() < until, transfer
        try:
            transfer.check()
        except ExpertwireError as error:
            seen = f"{type(error).__name__}: {error}"
    if transfer.error:
        seen = f"{type(transfer.error).__name__}: {transfer.error}"
    return transfer.state().value, seen


def one_write(here: Here, name: str, base: int) -> str:
    """64 bytes; what came of it."""
    try:
        transfer = here.agent.initialize("WRITE", [(here.base, 64, 0)], [(base, 64, 0)], name, kind="DRAM")
        transfer.post()
        transfer.wait()
        transfer.release()
    except ExpertwireError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def keep_transfer(here: Here, name: str, base: int) -> None:
    here.kept["stale"] = here.agent.initialize("WRITE", [(here.base, 64, 0)], [(base, 64, 0)], name, kind="DRAM")


def post_stale(here: Here) -> str:
    transfer = here.kept["stale"]
    try:
        transfer.post()
        transfer.wait()
    except ExpertwireError as error:
        transfer.release()
        return f"{type(error).__name__}: {error} [{transfer.state().value}]"
    return "done"


def deregister(here: Here) -> None:
    here.agent.deregister(here.kept["memory"])


def remove(here: Here, name: str) -> list[str]:
    here.agent.remove_remote(name)
    found: list[str] = here.agent.remotes()
    return found


def known(here: Here, rows: list[tuple[int, int, int]], name: str) -> tuple[bool, list[bool]]:
    return here.agent.knows(name, Descriptors.of(rows, "DRAM")), here.agent.registered(here.kept["memory"])


def add_refused(here: Here, card: Card) -> str:
    try:
        here.agent.add_remote(card)
    except ExpertwireError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def in_a_child(here: Here) -> list[str]:
    """What a forked child is told, and how it ended."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = []
        transfer = here.kept["stale"]
        calls = (
            here.agent.card,
            here.agent.notifications,
            lambda: here.agent.notify("b", b""),
            transfer.post,
            transfer.check,
            transfer.release,
        )
        for call in calls:
            try:
                call()
                said.append("nothing")
            except ExpertwireError as error:
                said.append(f"{type(error).__name__}: {error}")
        here.agent.close()
        os.write(writer, "\n".join(said).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        said = file.read().split("\n")
    assert os.waitpid(pid, 0)[1] == 0
    return said


def loopback(here: Here) -> list[str]:
    """From this agent to itself."""
    here.fill(5)
    there = [(here.base + 1_000_000, 5000, 0)]
    transfer = here.agent.initialize("WRITE", [(here.base, 5000, 0)], there, here.agent.name, b"to myself", kind="DRAM")
    transfer.post()
    transfer.wait()
    here.agent.notify(here.agent.name, b"")
    assert take(here, 2) == {here.agent.name: [b"to myself", b""]}
    return [each for each in [here.holds(1_000_000, 5000, here.source, 5, 0)] if each]


def first_bytes(here: Here) -> set[int]:
    return set(here.arena[:64].tolist())


def first_hold(here: Here, source: int, epoch: int) -> str:
    return here.holds(0, 64, source, epoch, 0)


def until_refused(here: Here, name: str, base: int) -> str:
    """What a write says once the agent's end is known here."""
    until = time.monotonic() + WAIT_S
    while (said := one_write(here, name, base)) == "done" or "PeerError" not in said:
        assert time.monotonic() < until, said
    return said


def deregister_now(here: Here) -> str:
    try:
        here.agent.deregister(here.kept["memory"], timeout_ms=50)
    except ExpertwireError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def bulk_holds(here: Here, source: int, epoch: int) -> str:
    return here.holds(0, END_BYTES, source, epoch, 0)


def part_unheard(here: Here, other: str) -> None:
    """Remove an agent that is stopped; then look around as often as it is not heard yet."""
    here.agent.remove_remote(other)
    for _ in range(3):
        here.agent._connections.look_around()
        here.agent._connections.join()


def is_visited_by_nobody(here: Here) -> bool:
    """Within 30 s."""
    until = time.monotonic() + 30
    while any(peer.visitor for peer in here.agent._connections.peers.all()):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
