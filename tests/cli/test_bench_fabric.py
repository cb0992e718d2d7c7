"""`bench fabric`, its raw loop, and `bench ep --loop`: what they verify, what they refuse, and that a wrong byte would be seen."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cli.test_commands import as_a_process, expertwire, values
from expertwire.cli.bench.raw import RawSide, raw_loop_path
from expertwire.cli.main import main
from expertwire.cli.report import Exit
from expertwire.errors import TransferError
from expertwire.fabric.config import Settings
from expertwire.fabric.discover import best_library

MIB = 1 << 20
FIGURES = {
    "raw_GBps",
    "async_GBps",
    "sync_GBps",
    "wire_utilization",
    "message_rate_utilization",
    "async_over_sync",
    "post_ns",
    "status_check_ns",
}


@pytest.fixture(scope="module")
def library() -> str:
    return best_library(Settings())


def test_the_raw_loop_delivers_and_sees_a_wrong_byte(library: str) -> None:
    with RawSide(library, "tcp;ofi_rxm", "127.0.0.1", MIB) as one, RawSide(library, "tcp;ofi_rxm", "127.0.0.1", MIB) as other:
        one.connect(other.address)
        other.connect(one.address)
        one.fill(16 * 4096, 7)
        other.fill(16 * 4096, 8)
        one.start(4096, 4, 16, 50)
        other.start(4096, 4, 16, 50)
        sent = [one.sent(), other.sent()]
        assert all(0 < side.operations == side.posts <= 64 * side.polls for side in sent)
        assert one.stop() > 0
        assert other.stop() > 0
        places = [min(16, side.operations) for side in sent]
        assert other.wrong_words(places[0] * 4096, 7) == 0
        assert one.wrong_words(places[1] * 4096, 8) == 0
        assert one.wrong_words(4096, 7) == 512


def test_the_raw_loop_says_what_is_wrong(library: str) -> None:
    with pytest.raises(TransferError, match="fi_getinfo"):
        RawSide(library, "no_such_provider", "127.0.0.1", MIB)
    with pytest.raises(TransferError, match="no_such_library"):
        RawSide("/no_such_library.so", "tcp;ofi_rxm", "127.0.0.1", MIB)
    with RawSide(library, "tcp;ofi_rxm", "127.0.0.1", MIB) as side, pytest.raises(TransferError, match="do not fit 1048576"):
        side.fill(2 * MIB, 1)
    assert subprocess.run([raw_loop_path()], capture_output=True, check=False).returncode == Exit.USAGE


def test_the_raw_loop_shares_nothing_with_the_engine() -> None:
    source = (Path(__file__).resolve().parents[2] / "csrc" / "raw" / "raw_loop.cpp").read_text()
    assert '#include "' not in source
    assert "FI_DELIVERY_COMPLETE" in source


def test_bench_fabric_verifies_and_names_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "fabric.json"
    words = ["--provider", "tcp", "--bytes", "7168,65536", "--window", "3,32", "--iterations", "2", "--seconds", "0.02"]
    done = expertwire("bench", "fabric", *words, "--json", str(out))
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    shapes = {(size, window, direction) for size in (7168, 65_536) for window in (3, 32) for direction in ("uni", "bi")}
    for name in FIGURES | {"verified"}:
        named = [row for row in rows if row["name"] == name]
        assert {(row["bytes"], row["window"], row["direction"]) for row in named} == shapes
        assert len(named) == len(shapes), "one median row per combination"
        assert all(row["value"] > 0 and row["provider"] == "tcp" and row["status"] == "ok" for row in named)
    for row in values(out, "raw_GBps"):
        assert row["low"] <= row["value"] <= row["high"]
        assert row["posts"] > 0
        assert row["polls"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fabric", "--bytes", "100"], "--bytes names 100"),
        (["fabric", "--bytes", "4k"], "--bytes is '4k'"),
        (["fabric", "--window", "0"], "--window names 0; it must be 1 to 512"),
        (["fabric", "--seconds", "0"], "--seconds is 0.0"),
        (["fabric", "--iterations", "0"], "--iterations is 0; the least is 1"),
        (["ep", "--shape", "2gbit"], "--shape and --microbatches are of --loop"),
        (["ep", "--loop", "0"], "--loop is 0.0"),
        (["ep", "--loop", "1", "--ranks-per-node", "8"], "nothing would cross the wire"),
        (["ep", "--loop", "1", "--microbatches", "9"], "--microbatches is 9; it must be 1 to 8"),
        (["ep", "--loop", "1", "--shape", "quick"], "--shape is 'quick'"),
    ],
)
def test_mistakes_are_status_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == Exit.USAGE
    assert message in capsys.readouterr().err


def test_a_provider_without_a_wire_is_status_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "fabric", "--provider", "local"]) == Exit.SKIPPED
    assert "no raw loop" in capsys.readouterr().err


LOOP = ("bench", "ep", "--loop", "0.5", "--ranks", "2", "--ranks-per-node", "1", "--tokens", "64", "--hidden", "1024")


def test_bench_ep_loop_verifies_and_counts_what_crossed(tmp_path: Path) -> None:
    out = tmp_path / "loop.json"
    done = expertwire(*LOOP, "--microbatches", "2", "--json", str(out))
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    assert [row["engine"] for row in values(out, "verified")] == ["async", "sync", "microbatched"]
    assert all(row["value"] == 1 for row in values(out, "verified"))
    assert all(row["value"] >= 1 for row in values(out, "interface_over_wire"))
    for name in ("raw_GBps", "async_over_sync", "overlap_gain"):
        assert [row["value"] > 0 for row in values(out, name)] == [True]


def test_a_shaped_loopback_or_a_word_why_not(tmp_path: Path) -> None:
    out = tmp_path / "loop.json"
    done = as_a_process(*LOOP, "--shape", "2gbit", "--json", str(out))  # in a network namespace of its own
    if done.returncode == Exit.SKIPPED:
        row = values(out, "wire_utilization")[0]
        assert row["status"] == "skipped"
        assert "--shape" in row["why"]
        return
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    assert all(row["value"] >= 1 for row in values(out, "interface_over_wire"))
    assert 0 < values(out, "raw_GBps")[0]["value"] < 0.3, "no more than 2 Gbit/s"
