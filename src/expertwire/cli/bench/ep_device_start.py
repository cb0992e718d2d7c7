"""Starts the ranks of `bench ep --device cuda`, in a process whose environment has what they need: `python -m … DIRECTORY`.

Beside `ep_device`, for ranks run the module again that their parent ran.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from expertwire.cli.launch import launch
from expertwire.cli.progress import RankProgress
from expertwire.errors import ExpertwireError


def main(directory: str) -> int:
    """Start them, and leave behind what went wrong."""
    folder = Path(directory)
    sys.path[:], setup = pickle.loads((folder / "setup").read_bytes())
    from expertwire.cli.bench.ep_device import LAUNCH_S
    from expertwire.cli.bench.ep_device_rank import rank_main

    failure = ""
    try:
        with RankProgress(setup.ranks) as progress:
            launch(rank_main, (setup,), setup.ranks, on_progress=progress.update, timeout_s=setup.budget_s + LAUNCH_S)
    except ExpertwireError as error:
        failure = f"{type(error).__name__}: {error}"
        print(f"expertwire: {failure}", file=sys.stderr, flush=True)
    (folder / "said").write_text(failure, encoding="utf-8")
    return int(bool(failure))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except KeyboardInterrupt:  # whoever began this says so
        sys.exit(130)
