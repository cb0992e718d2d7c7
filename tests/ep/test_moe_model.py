"""The example: a model whose experts are spread over ranks gives the logits, and the gradients, of the model in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ep import model_bodies
from expertwire.cli.report import Exit, Report, RowStatus
from harness import World

SMALL = {"hidden": 64, "layers": 2, "head_dim": 16, "intermediate": 32, "length": 16}
# ranks as two nodes of two; uneven nodes and uneven experts; more ranks than experts, so that one has none
CASES: list[tuple[tuple[int, ...], dict[str, int]]] = [
    ((0, 0, 1, 1), SMALL),
    ((0, 0, 0, 1, 1), {**SMALL, "experts": 13, "topk": 5, "sequences": 1}),
    ((0, 1, 1), {**SMALL, "experts": 2, "topk": 1, "sequences": 1}),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the ranks have it: at these sizes more cost more than they give."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def compared(model: Any, shape: Any, ranks: list[Any], one: Any, train: bool) -> Report:
    report = Report("test", {})
    model.compare(report, shape, ranks, one, train)
    return report


def test_logits_and_a_step_of_training(world: World) -> None:
    model = model_bodies.example()
    for node_of, sizes in CASES:
        shape = model.Shape(**sizes)
        ranks = [model.Outcome(**found) for found in world.run(len(node_of), model_bodies.spread, node_of, sizes, True)]
        one = model.alone(shape, ranks, True)
        report = compared(model, shape, ranks, one, True)
        assert report.exit_status() is Exit.OK, [row.as_json() for row in report.rows if row.status is not RowStatus.OK]
        assert one.losses[1] < one.losses[0], "it learns"
        assert {"logits_calc_diff", "other_experts", "loss_difference", "gradient_calc_diff"} <= {row.name for row in report.rows}
        assert max(abs(value).max() for value in one.gradients.values()) > 0
    # and what is wrong is seen
    name = next(name for name in ranks[0].gradients if ".experts." in name)
    others = {**ranks[0].gradients, name: ranks[0].gradients[name] * 1.1}
    for wrong in (
        replace(ranks[0], logits=ranks[0].logits * 1.1),
        replace(ranks[0], gradients=others),
        replace(ranks[0], losses=[ranks[0].losses[0] * 1.001, ranks[0].losses[1]]),
    ):
        assert compared(model, shape, [wrong, *ranks[1:]], one, True).exit_status() is Exit.FAILED
    elsewhere = replace(ranks[0], ids=[[(ids + 1) % shape.experts for ids in layer] for layer in ranks[0].ids])
    assert model.alone(shape, [elsewhere, *ranks[1:]], True).wrong > 0


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_bodies.example()
    monkeypatch.syspath_prepend(model_bodies.EXAMPLE.parent)  # ranks import it by name
    figures = tmp_path / "figures.json"
    sizes = ["--layers", "1", "--hidden", "32", "--length", "8"]
    assert model.main(["--ranks", "2", "--ranks-per-node", "1", *sizes, "--json", str(figures)]) == 0
    assert "2 ranks against one process: 1 layers, 16 experts" in capsys.readouterr().out
    rows = json.loads(figures.read_text())["rows"]
    assert {row["name"] for row in rows} == {"logits_calc_diff", "near_ties", "other_experts"}
    with pytest.raises(SystemExit, match="0"):
        model.main(["--help"])
    assert "the gradient of a combine is a dispatch" in " ".join(capsys.readouterr().out.split())
    faults = {"--ranks 0": "--ranks is 0; the least is 1", "--top-k 17": "--top-k is 17; a token can have at most the 16"}
    for words, message in faults.items():
        with pytest.raises(SystemExit, match="2"):
            model.main(words.split())
        assert message in capsys.readouterr().err
