"""Whole dispatches and combines of the source's shapes in virtual time, where every write is pulled by its target, gate on and off.

The source saw payloads corrupted from 1,024 tokens a rank on with FI_CXI_RDZV_THRESHOLD=0, because a signal that is sent right behind its
write overtakes it there. Rows are small in memory; every byte is checked against the oracle.
"""

from __future__ import annotations

from typing import Any

import pytest

from expertwire import _simulation

SOURCE = {"ranks": 8, "ranks_per_node": 4, "experts": 288, "topk": 8, "row_bytes": 64}
EVERY_WRITE_IS_PULLED = 0
CHUNKS_ARE_PULLED = 4096  # and the small notifies are not
NOTHING_IS_PULLED = 1 << 40


def run(**options: Any) -> dict[str, Any]:
    result: dict[str, Any] = _simulation.run_exchange_timed({**SOURCE, **options})
    return result


@pytest.mark.parametrize("tokens", [1024, 4096])
@pytest.mark.parametrize("combine", [False, True])
def test_gated_signals_never_say_that_rows_are_there_before_they_are(tokens: int, combine: bool) -> None:
    result = run(tokens=tokens, rendezvous_bytes=EVERY_WRITE_IS_PULLED, combine=combine)
    assert result["error"] == ""
    assert result["chunks"] >= 8 * tokens * 0.99 / 16
    assert len(result["call_ns"]) == 1 + combine


@pytest.mark.parametrize("tokens", [1024, 4096])
def test_without_the_gate_pulled_rows_are_overtaken(tokens: int) -> None:
    corrupt = run(tokens=tokens, rendezvous_bytes=CHUNKS_ARE_PULLED, chunk_rows=64, gate=False)
    assert "chunk" in corrupt["error"] or "differs" in corrupt["error"], corrupt["error"]
    assert run(tokens=tokens, rendezvous_bytes=CHUNKS_ARE_PULLED, chunk_rows=64)["error"] == ""
    assert "disagree" in run(tokens=tokens, rendezvous_bytes=EVERY_WRITE_IS_PULLED, gate=False)["error"], "not even the notify holds"


def test_order_holds_where_nothing_is_pulled() -> None:
    """Why the fault stayed unseen: on an eager network that keeps order, the same signals without a gate are right."""
    assert run(tokens=1024, rendezvous_bytes=NOTHING_IS_PULLED, gate=False)["error"] == ""


@pytest.mark.parametrize("combine", [False, True])
def test_the_synchronous_fallback_moves_the_same_bytes_later(combine: bool) -> None:
    asynchronous = run(tokens=1024, rendezvous_bytes=EVERY_WRITE_IS_PULLED, combine=combine)
    synchronous = run(tokens=1024, rendezvous_bytes=EVERY_WRITE_IS_PULLED, combine=combine, synchronous=True)
    assert synchronous["error"] == ""
    assert synchronous["wire_bytes"] == asynchronous["wire_bytes"]
    assert synchronous["call_ns"][-1] > asynchronous["call_ns"][-1]


def test_virtual_time_is_the_same_every_time() -> None:
    assert run(tokens=128) == run(tokens=128)
    assert run(tokens=128)["trace_hash"] != run(tokens=128, seed=1)["trace_hash"]


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ValueError, match="there is not"):
        run(speed=3)
