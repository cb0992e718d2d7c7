"""The progress thread, several threads on one endpoint, and every order of ending."""

from __future__ import annotations

import subprocess
import sys

import pytest

from expertwire.errors import StateError
from expertwire.fabric import Endpoint
from expertwire.fabric.config import Settings
from fabric import bodies
from fabric.ranks import LOCAL, TCP, ranks

BOTH = pytest.mark.parametrize("settings", [LOCAL, TCP], ids=["local", "tcp"])
IDLE_SHARE_MAX = 0.02


@BOTH
def test_an_idle_endpoint_costs_next_to_nothing(settings: Settings) -> None:
    with ranks(2, settings) as pair:
        pair[0].call(bodies.write_signalled, 1, 4096, 4)
        shares = pair.all(bodies.idle_cpu, 1.5)
    assert max(shares) <= IDLE_SHARE_MAX, f"shares of a core: {shares}"


@BOTH
def test_threads_on_one_endpoint_are_serialised(settings: Settings) -> None:
    with ranks(2, settings) as pair:
        wanted, failures = pair[0].call(bodies.hammer, 1, 6, 60)
        assert failures == []
        assert pair[1].call(bodies.counters, 7, 6) == [60] * 6
        counted = pair[0].call(bodies.statistics)
        assert counted.requests_done >= wanted
        assert counted.requests_failed == 0
        assert counted.misuses == 0
        assert counted.thread_failures == 0


@BOTH
def test_close_twice_and_calls_after_it(settings: Settings) -> None:
    with ranks(2, settings) as pair:
        assert pair[0].call(bodies.close_twice)
        with pytest.raises(StateError, match="closed"):
            pair[0].call(bodies.statistics_after_close)


def test_an_endpoint_never_started_or_closed_cleans_up() -> None:
    for _ in range(3):
        endpoint = Endpoint(0, 1, LOCAL)
        endpoint.region("data", 4096)
        del endpoint


ENDINGS = {
    "never": "",
    "closed": "b.close(); a.close()",
    "twice": "a.close(); a.close(); b.close()",
    "first the request": "del r; a.close()",
    "endpoint before region": "del a; del b; del x; del y",
    "region before endpoint": "del x; del y; del a; del b",
    "in a cycle": "a.self = a; b.self = b; x.self = x; del a, b, x, y",
    "sys.exit": "import sys; sys.exit(0)",
}


@BOTH
@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
def test_any_end_is_silent(settings: Settings, ending: str) -> None:
    program = f"""
from expertwire.fabric import Endpoint, Signal
from expertwire.fabric.config import Settings
a, b = (Endpoint(rank, 2, Settings(provider={settings.provider!r}), counters=1) for rank in (0, 1))
x, y = a.region("data", 4096), b.region("data", 4096)
a.add_peer(1, b.blob()); b.add_peer(0, a.blob())
a.start(); b.start()
r = a.write(1, x, "data", signal=Signal(1))
assert b.wait_counter(0, 1)
{ending}
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
