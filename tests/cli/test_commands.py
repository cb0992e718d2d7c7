"""The commands: their files, their exit statuses, and an end by Ctrl-C that leaves nothing. Of each one test is a process of its own."""

from __future__ import annotations

import io
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli import targets
from expertwire.cli.launch import launch
from expertwire.cli.main import main
from expertwire.cli.report import Exit
from expertwire.fabric.config import DEFAULT_TIMEOUT_MS, VARIABLES

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 150


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@dataclass(frozen=True)
class Done:
    """What a command said, and its exit status."""

    returncode: int
    stdout: str
    stderr: str


def expertwire(*words: str) -> Done:
    """The command in this process, whose server of ranks has torch: one of its own imports it twice, 6 s of a core."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        status = main(words)
    return Done(status, out.getvalue(), errors.getvalue())


def as_a_process(*words: str) -> subprocess.CompletedProcess[str]:
    """The command as people run it."""
    command = [sys.executable, "-m", "expertwire.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment())


def values(path: Path, name: str) -> list[dict[str, Any]]:
    return [row for row in json.loads(path.read_text())["rows"] if row["name"] == name]


# Phase, and where combine's rows lay.
RATIOS = [("dispatch", None), ("combine", "received"), ("combine", "ordinary"), ("total", "received"), ("total", "ordinary")]


def ratios(path: Path, name: str) -> list[tuple[str, str | None]]:
    return [(row["phase"], row.get("combine_input")) for row in values(path, name)]


def of_group(group: int) -> list[int]:
    """Pidfds of what still lives of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == group:
                found.append(os.pidfd_open(int(entry.name)))
        except ProcessLookupError:
            continue
    return found


@pytest.mark.parametrize(
    "words",
    [
        ["--ranks", "4", "--ranks-per-node", "2", "--against", "gloo"],
        ["--ranks", "3", "--ranks-per-node", "2", "--tokens", "0,65,7", "--experts", "10", "--hidden", "2880", "--routing", "holes"],
        ["--ranks", "2", "--ranks-per-node", "2", "--routing", "none"],
        ["--ranks", "1", "--tokens", "0"],
    ],
    ids=["beside gloo", "ragged", "nobody sends", "alone and empty"],
)
def test_bench_ep_verifies(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "ep.json"
    small = ["--tokens", "40", "--hidden", "512", "--experts", "16", "--topk", "4", "--iterations", "2", "--warmup", "1"]
    done = expertwire("bench", "ep", *small, *words, "--json", str(out))
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    assert [row["value"] for row in values(out, "verified")] == [1] * (1 + ("gloo" in words))
    for name in ("layout_us", "dispatch_us", "combine_us"):
        row = values(out, name)[0]
        assert row["engine"] == "expertwire"
        assert 0 < row["low"] <= row["value"] <= row["high"]
        assert {"device", "ranks", "ranks_per_node", "tokens", "hidden", "experts", "topk", "dtype", "mode", "provider"} <= set(row)
    if "gloo" in words:
        assert ratios(out, "over_gloo") == RATIOS
        assert len(values(out, "dispatch_GBps")) == 2
    assert "verified" in done.stdout


def test_bench_ep_smoke_has_its_own_shape(tmp_path: Path) -> None:
    out = tmp_path / "ep.json"
    done = as_a_process("bench", "ep", "--smoke", "--ranks", "2", "--iterations", "1", "--warmup", "0", "--json", str(out))
    assert done.returncode == Exit.OK, done.stderr
    row = values(out, "verified")[0]
    assert (row["tokens"], row["hidden"], row["experts"], row["topk"]) == (128, 1024, 64, 4)
    assert [row["value"] for row in values(out, "worst_tokens_verified")] == [1]
    config = json.loads(out.read_text())["config"]
    assert config["options"]["smoke"] is True
    assert config["options"]["tokens"] == "1024", "as it was by default"
    assert (config["tokens"], config["provider"]) == ([128, 128], row["provider"]), "what it was resolved to"


def test_bench_ep_beside_its_own_synchronous_fallback(tmp_path: Path) -> None:
    out = tmp_path / "ep.json"
    small = ["--rank-tokens", "40,0,7", "--hidden", "512", "--experts", "16", "--topk", "4", "--iterations", "2", "--warmup", "0"]
    tuned = ["--skew", "--sms", "24", "--dispatch-config", "8,256,6,128", "--combine-config", "4,256,8,128"]
    done = expertwire("bench", "ep", *small, *tuned, "--ranks", "3", "--ranks-per-node", "2", "--against", "sync", "--json", str(out))
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    assert [(row["engine"], row["value"]) for row in values(out, "verified")] == [("expertwire", 1), ("sync", 1)]
    assert ratios(out, "async_over_sync") == RATIOS
    assert all(row["value"] > 0 for row in values(out, "async_over_sync"))
    assert {row["engine"] for row in values(out, "dispatch_us")} == {"expertwire", "sync"}
    config = json.loads(out.read_text())["config"]
    assert (config["routing"], config["sms"], config["tokens"]) == ("skewed", 24, [40, 0, 7])
    assert (config["dispatch_config"], config["combine_config"]) == ([8, 256, 6, 128], [4, 256, 8, 128])


@pytest.mark.parametrize(
    ("words", "places"),
    [
        (["--against", "ht", "--against", "sync"], ["received", "ordinary", "zero_copy"]),
        (["--against", "ht", "--dtype", "fp8"], ["ordinary", "zero_copy"]),
    ],
    ids=["bf16", "fp8"],
)
def test_bench_ep_low_latency_verifies(words: list[str], places: list[str], tmp_path: Path) -> None:
    out = tmp_path / "ep.json"
    shape = ["--rank-tokens", "9,0,17", "--hidden", "520", "--experts", "10", "--topk", "4", "--routing", "holes", "--iterations", "2"]
    done = expertwire("bench", "ep", "--mode", "ll", *shape, *words, "--ranks", "3", "--ranks-per-node", "2", "--json", str(out))
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    engines = ["expertwire", *(["sync"] if "sync" in words else []), "high_throughput"]
    assert [(row["engine"], row["value"]) for row in values(out, "verified")] == [(engine, 1) for engine in engines]
    row = values(out, "dispatch_us")[0]
    assert (row["mode"], row["dtype"], row["tokens"], row["ranks_per_node"]) == (
        "low_latency",
        words[-1] if "fp8" in words else "bf16",
        17,
        2,
    )
    for name in ("combine_us", "combine_GBps", "combine_send_us", "combine_hook_us"):
        assert [row["combine_input"] for row in values(out, name) if row["engine"] == "expertwire"] == places
    parts = [values(out, f"dispatch_{part}_us")[0]["low"] for part in ("send", "hook")]
    assert min(parts) > 0
    assert all(row["value"] > 0 for name in ("over_ht", "dispatch_GBps") for row in values(out, name))
    # What is posted in the timed window alone: a busy machine may post a call's rows behind it.
    assert all(values(out, name) and all(row["value"] >= 0 for row in values(out, name)) for name in ("wire_operations", "wire_bytes"))
    assert {row["engine"] for row in values(out, "dispatch_GBps")} == set(engines) - {"high_throughput"}, "its rows count otherwise"


def test_bench_ep_moves_fp8_rows(tmp_path: Path) -> None:
    out = tmp_path / "ep.json"
    done = expertwire(
        "bench", "ep", "--smoke", "--dtype", "fp8", "--ranks", "2", "--ranks-per-node", "1", "--iterations", "1", "--json", str(out)
    )
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    assert [row["value"] for name in ("verified", "worst_tokens_verified") for row in values(out, name)] == [1, 1]
    assert [row["combine_input"] for row in values(out, "combine_us")] == ["ordinary"]
    rows = values(out, "wire_bytes")[0]
    assert rows["dtype"] == "fp8"
    assert rows["value"] % (1024 + 8 * 4) == 0, "rows with their scales"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "-5"], "--tokens is -5; the least is 0"),
        (["--rank-tokens=4,-1", "--ranks", "2"], "--tokens is 4,-1; the least is 0"),
        (["--sms", "7"], "--sms is 7; it must be even"),
        (["--dispatch-config", "8,256,6"], "--dispatch-config is 8,256,6; that is 3 numbers, it must be 4"),
        (["--combine-config", "8,256,x,1"], "--combine-config is '8,256,x,1'; give 4 whole numbers"),
        (["--combine-config", "8,8,6,128"], "must be less than num_max_nvl_chunked_recv_tokens, which is 8"),
        (["--smoke", "--preset", "slingshot-ep8"], "two shapes; give one"),
        (["--mode", "ll", "--against", "gloo"], "--against gloo with --mode ll; that mode has ht and sync beside it"),
        (["--against", "ht"], "--against ht with --mode ht; that mode has gloo and mpi and sync beside it"),
        (["--dtype", "fp8", "--against", "gloo"], "what users write with gloo moves bf16 rows"),
        (["--mode", "ll", "--loop", "1"], "--loop with --mode ll and --dtype bf16; it is of --mode ht and --dtype bf16 alone"),
    ],
)
def test_bench_ep_refuses_what_cannot_be_meant(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ep", *words]) == Exit.USAGE
    assert message in capsys.readouterr().err


def test_doctor_says_whether_a_shape_fits() -> None:
    from expertwire.cli import doctor
    from expertwire.cli.report import Report
    from expertwire.ep import Buffer
    from expertwire.errors import InvalidArgumentError

    report = Report("doctor", {})
    for text in ("128,1024,64,4,3,2", "4000000,7168,256,8,8,4"):
        doctor._fits(report, *doctor.parse_shape(text))
    small, large = (row.as_json() for row in report.rows)
    plan = Buffer.memory_plan([0, 0, 1], num_max_recv_tokens=384, hidden=1024, num_topk=4, max_local_experts=22)
    assert small["value"] == max(one.total_bytes for one in plan)
    assert small["needed_bytes"] == plan[0].total_bytes + plan[1].total_bytes
    assert (small["status"], large["status"]) == ("ok", "failed")
    assert large["needed_bytes"] > large["available_bytes"] > 0
    for number in ("needed_bytes", "available_bytes"):
        assert str(large[number]) in large["found"]
    for text, said in (("1,2", "that is 2 numbers"), ("a,1,1,1,1,1", "whole numbers"), ("1,1,0,1,1,1", "EXPERTS is 0, the least is 1")):
        with pytest.raises(InvalidArgumentError, match=said):
            doctor.parse_shape(text)


def test_doctor_says_whether_a_low_latency_shape_fits() -> None:
    from expertwire.cli import doctor
    from expertwire.cli.report import Report
    from expertwire.ep import Buffer

    report = Report("doctor", {})
    doctor._fits_low_latency(report, *doctor.parse_shape("128,1024,64,4,3,2"))
    doctor._fits_low_latency(report, *doctor.parse_shape("8192,7168,256,8,8,8"))
    whole, least, large, _ = (row.as_json() for row in report.rows)
    hint = Buffer.get_low_latency_rdma_size_hint(128, 1024, 3, 64)
    plan = Buffer.memory_plan([0, 0, 1], num_rdma_bytes=hint, low_latency_mode=True, max_local_experts=22)
    assert whole["value"] == max(one.total_bytes for one in plan)
    assert plan[0].low_latency_data_bytes >= hint
    assert whole["needed_bytes"] == plan[0].total_bytes + plan[1].total_bytes
    assert whole["value"] > least["value"] > 0
    assert (whole["status"], least["status"], large["status"]) == ("ok", "ok", "failed")
    assert re.fullmatch(r"num_rdma_bytes=\d+ is enough where no combine is zero-copy", large["advice"])


def test_the_preset_is_the_published_shape() -> None:
    import argparse

    from expertwire.cli.bench import ep

    parser = argparse.ArgumentParser()
    ep.add_arguments(parser)
    setup = ep.parse(parser.parse_args(["--preset", "slingshot-ep8", "--iterations", "3"]))
    assert (setup.node_of, setup.tokens) == ((0, 0, 0, 0, 1, 1, 1, 1), (4096,) * 8)
    assert (setup.hidden, setup.experts, setup.topk, setup.routing) == (7168, 288, 8, "uniform")
    assert (setup.against, setup.iterations, setup.worst) == (("sync",), 3, False)


def test_a_provider_that_is_not_here_is_status_3_or_2() -> None:
    done = expertwire("bench", "ep", "--smoke", "--ranks", "2", "--ranks-per-node", "1", "--provider", "nosuch")
    assert done.returncode in (Exit.SKIPPED, Exit.USAGE)
    assert "nosuch" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_demo_verifies_and_reports(tmp_path: Path) -> None:
    out, text = tmp_path / "demo.json", tmp_path / "text"
    text.write_text("Some words of our own, and some more of the same words, again and again.")
    done = as_a_process("demo", "--tokens", "24", "--ranks", "4", "--ranks-per-node", "2", "--text", str(text), "--json", str(out))
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    assert [row["value"] for row in values(out, "verified")] == [1, 1]
    assert values(out, "layer_payload_verified")[0]["value"] == 1
    assert {row["engine"] for row in values(out, "layer_calc_diff")} == {"expertwire", "gloo"}
    assert all(0 < row["value"] <= 5e-6 for row in values(out, "layer_calc_diff") if row["part"] == "whole")
    for name in ("over_gloo", "over_gloo_exchange"):
        assert ratios(out, name) == RATIOS
        assert all(row["value"] > 0 for row in values(out, name))
    whole = {(row["engine"], row["phase"], row.get("combine_input")): row["value"] for row in values(out, "whole_us")}
    shown = re.findall(r"([\d,]+\.\d) ms\s+│.*?([\d,]+\.\d) ms\s+│\s+([\d.]+) ×", done.stdout)
    assert len(shown) == len(RATIOS)
    for (phase, place), row, (ours, gloo, ratio) in zip(RATIOS, values(out, "over_gloo"), shown, strict=True):
        of_gloo = whole["gloo", phase, None if phase == "dispatch" else "ordinary"]
        of_ours = whole["expertwire", phase, place]
        assert row["value"] == pytest.approx(of_gloo / of_ours, abs=1e-3)
        assert (float(ours), float(gloo)) == pytest.approx((of_ours / 1e3, of_gloo / 1e3), abs=0.051), (
            "what a person sees is what is compared"
        )
        assert float(ratio) == pytest.approx(row["value"], abs=0.0051)
    assert 0.1 < values(out, "memory_peak_GiB")[0]["value"] < 12
    assert values(out, "demo_s")[0]["value"] > 0
    assert "every payload verified" in done.stdout


def test_the_demo_takes_a_recorded_routing(tmp_path: Path) -> None:
    out, trace = tmp_path / "demo.json", tmp_path / "trace.npz"
    ids = np.random.default_rng(1).integers(-1, 256, size=(10, 3))
    np.savez(trace, topk_idx=ids)
    done = expertwire("demo", "--tokens", "8", "--ranks", "2", "--ranks-per-node", "1", "--routing", str(trace), "--json", str(out))
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    assert json.loads(out.read_text())["config"]["topk"] == 3
    assert [row["value"] for row in values(out, "verified")] == [1, 1]


@pytest.mark.parametrize("stage", ["text to rows", "ready", "layer"], ids=["before the ranks", "measuring", "one process"])
def test_ctrl_c_ends_the_demo_cleanly(stage: str, scratch: Path) -> None:
    """Sent to the whole foreground group, as a terminal does, while the server loads torch, the ranks are at work, or they have ended."""
    demo = subprocess.Popen(
        [sys.executable, "-m", "expertwire.cli", "demo", "--tokens", "64", "--ranks", "2", "--ranks-per-node", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**environment(), "TMPDIR": str(scratch)},
    )
    try:
        assert demo.stderr is not None
        seen = ""
        while stage not in seen:
            line = demo.stderr.readline()
            assert line, seen
            seen += line
        os.killpg(demo.pid, signal.SIGINT)
        _, rest = demo.communicate(timeout=60)
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
    assert demo.returncode == 130, rest
    assert "interrupted" in rest
    assert "Traceback" not in rest
    assert [path for path in scratch.iterdir() if path.name.startswith("expertwire")] == []
    for descriptor in of_group(demo.pid):
        ready, _, _ = select.select([descriptor], [], [], 15)
        os.close(descriptor)
        assert ready, "a process outlived the demo"


def test_the_readme_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    assert launch(targets.readme_example, (blocks[0],), 3, timeout_s=60) == [True, True, True]


def test_the_readme_prints_what_it_says(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (tmp_path / "exchange.py").write_text(re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0])
    found = re.search(r"\$ torchrun (.*)\n(.*)\n```", readme)
    assert found is not None
    command = [sys.executable, "-m", "torch.distributed.run", *found[1].split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment(), cwd=tmp_path)
    assert done.stdout.strip() == found[2], done.stderr


def test_every_setting_is_documented() -> None:
    table = re.findall(r"^\| `([A-Z_]+)` \| (.*?) \| (.*) \|$", (ROOT / "docs" / "use.md").read_text(), re.MULTILINE)
    assert {name: note for name, _, note in table} == VARIABLES
    readme = (ROOT / "README.md").read_text()
    assert set(re.findall(r"EXPERTWIRE_[A-Z_]+", readme)) <= set(VARIABLES)
    assert f"{DEFAULT_TIMEOUT_MS:,} ms by default" in readme
    assert f"| {DEFAULT_TIMEOUT_MS} |" in (ROOT / "docs" / "use.md").read_text()


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_the_makefile_works_where_the_path_has_spaces(tmp_path: Path) -> None:
    place = tmp_path / "sp ace"
    place.mkdir()
    for name in ("Makefile", "csrc", "src", "tools", "CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"):
        (place / name).symlink_to(ROOT / name)
    for target in ("demo", "test"):
        # A make above this test would have its own say: "Entering directory …", with the path.
        command = ["make", "--no-print-directory", "-n", target]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=place)
        assert done.returncode == 0, done.stderr
        assert str(place) not in done.stdout, "recipes run where they are: whatever is in that path is not theirs to quote"


def test_the_readme_names_only_commands_that_exist() -> None:
    from expertwire.cli.main import COMMANDS

    offered = {" ".join(command.words) for command in COMMANDS}
    named = set(re.findall(r"^expertwire ((?:(?:bench|soak) )?[a-z]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert named
    assert named <= offered


def test_nothing_is_left_in_the_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    launch(targets.add_up, (1,), 2, timeout_s=60)
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("pymp-")] == []
