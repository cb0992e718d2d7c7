"""Counters of transfers: right, bounded, in Prometheus' format, and harmless whatever they are given."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from typing import Any

from expertwire.transfer.telemetry import ERRORS_MAX, RECENT, Telemetry, TransferTelemetry


@dataclass
class Moved:
    operation: str = "READ"
    path: str = "tcp"
    nbytes: int = 4096
    run_count: int = 3
    posted_ns: int = 1_000_000
    post_duration_ns: int = 2_500
    start_wall_ns: int = 1_700_000_000_000_000_000
    ended_ns: int | None = 1_030_000


def value(text: str, name: str, **labels: str) -> float:
    inside = ",".join(f'{key}="{label}"' for key, label in {"agent": "a", **labels}.items())
    (found,) = re.findall(rf"^{name}{{{re.escape(inside)}}} (\S+)$", text, re.MULTILINE)
    return float(found)


def test_what_one_took() -> None:
    telemetry = Telemetry("a")
    assert telemetry.ended(Moved()) == TransferTelemetry(1_700_000_000_000_000, 2, 30, 4096, 3)
    assert telemetry.ended(Moved(post_duration_ns=10, ended_ns=1_000_100)) == TransferTelemetry(1_700_000_000_000_000, 1, 1, 4096, 3)
    assert telemetry.ended(Moved(ended_ns=None)) is None


def test_counters_add_up() -> None:
    telemetry = Telemetry("a")
    for number in range(10):
        telemetry.posted("WRITE")
        telemetry.ended(Moved("WRITE", nbytes=100, ended_ns=1_000_000 + 1000 * 10**number))
    telemetry.failed("READ", ValueError("x"))
    telemetry.notified(sent=2)
    telemetry.notified(received=3)
    text = telemetry.prometheus()
    assert value(text, "expertwire_transfers_posted_total", operation="WRITE") == 10
    assert value(text, "expertwire_transfers_done_total", operation="WRITE") == 10
    assert value(text, "expertwire_transfer_bytes_total", operation="WRITE") == 1000
    assert value(text, "expertwire_transfer_path_bytes_total", path="tcp") == 1000
    assert value(text, "expertwire_transfer_descriptors_total", operation="WRITE") == 30
    assert value(text, "expertwire_transfers_failed_total", operation="READ") == 1
    assert value(text, "expertwire_transfer_errors_total", error="ValueError") == 1
    assert value(text, "expertwire_notifications_total", direction="sent") == 2
    assert value(text, "expertwire_notifications_total", direction="received") == 3
    name = "expertwire_transfer_duration_microseconds"
    assert [value(text, f"{name}_bucket", operation="WRITE", le=le) for le in ("10", "100", "1000", "10000000", "+Inf")] == [2, 3, 4, 8, 10]
    assert value(text, f"{name}_count", operation="WRITE") == 10
    assert value(text, f"{name}_sum", operation="WRITE") == sum(10**number for number in range(10))


def test_the_text_is_what_prometheus_reads() -> None:
    telemetry = Telemetry('a"\\\nb')
    telemetry.posted("READ")
    telemetry.ended(Moved())
    text = telemetry.prometheus()
    assert text.endswith("\n")
    sample = re.compile(r'[a-z_]+(?:\{[a-z_]+="(?:[^"\\\n]|\\[\\"n])*"(?:,[a-z_]+="(?:[^"\\\n]|\\[\\"n])*")*\})? [0-9.]+')
    typed: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            name, kind = line.split()[2:]
            assert name not in typed
            typed.add(name)
            assert kind in ("counter", "histogram")
            assert kind == "histogram" or name.endswith("_total")
        elif not line.startswith("# HELP"):
            assert sample.fullmatch(line), line
            assert re.sub(r"_(bucket|sum|count)$", "", line.split("{")[0]) in typed or line.split("{")[0] in typed
    assert 'agent="a\\"\\\\\\nb"' in text


def test_what_cannot_be_counted_is_counted_as_that() -> None:
    telemetry = Telemetry("a")
    odd: list[Any] = [None, object(), Moved(operation="COPY"), Moved(nbytes="many"), Moved(posted_ns=None)]  # type: ignore[arg-type]
    assert [telemetry.ended(each) for each in odd] == [None] * len(odd)
    assert value(telemetry.prometheus(), "expertwire_telemetry_faults_total") == len(odd)


def test_it_stays_as_small_as_it_is() -> None:
    telemetry = Telemetry("a")
    for number in range(10 * ERRORS_MAX):
        telemetry.failed("READ", type(f"Odd{number}Error", (Exception,), {})())
    for _ in range(3 * RECENT):
        telemetry.ended(Moved())
    text = telemetry.prometheus()
    assert text.count("expertwire_transfer_errors_total{") <= ERRORS_MAX + 1
    assert value(text, "expertwire_transfer_errors_total", error="other") == 9 * ERRORS_MAX
    assert len(telemetry._recent) == RECENT


def test_estimates_follow_what_was_seen() -> None:
    telemetry = Telemetry("a")
    assert telemetry.estimate_us(4096) is None
    telemetry.ended(Moved(nbytes=1000, ended_ns=1_000_000 + 20_000))
    assert telemetry.estimate_us(2000) == (40, 1)
    for kib in range(1, 100):
        telemetry.ended(Moved(nbytes=1000 * kib, ended_ns=1_000_000 + 10_000 + 10_000 * kib))
    assert telemetry.estimate_us(1_000_000) == (10_010, 1)
    assert telemetry.estimate_us(1)[0] == 10  # type: ignore[index]
    for _ in range(RECENT):
        telemetry.ended(Moved(nbytes=0, ended_ns=1_000_000 + 5_000))
    assert telemetry.estimate_us(0) == (5, 1)


def test_threads_count_together() -> None:
    telemetry = Telemetry("a")

    def count() -> None:
        for _ in range(500):
            telemetry.posted("READ")
            telemetry.ended(Moved())

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert value(telemetry.prometheus(), "expertwire_transfers_done_total", operation="READ") == 2000
