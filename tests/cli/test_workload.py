"""Text as input: the same every time, no two rows equal, routing that follows the words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from expertwire.cli import workload
from expertwire.cli.workload import Shape, embed, expert_weights, read_routing, read_text, route, run_experts, run_layer, words
from expertwire.errors import InvalidArgumentError

SHAPE = Shape(hidden=64, experts=10, width=4, topk=3)


def test_words_keep_the_text_and_repeat_it() -> None:
    tokens = words("One word, two words.", 9)
    assert tokens == ["One", " word", ",", " two", " words", ".", "One", " word", ","]
    with pytest.raises(InvalidArgumentError, match="no words"):
        words("", 3)


def test_rows_are_seeded_by_word_and_position() -> None:
    rows = embed(["a", "b", "a", "a"], 512)
    assert torch.equal(rows, embed(["a", "b", "a", "a"], 512))
    assert len({row.view(torch.int16).numpy().tobytes() for row in rows}) == 4, "no two rows are equal"
    near = torch.nn.functional.cosine_similarity(rows[0].float(), rows[2].float(), dim=0)
    far = torch.nn.functional.cosine_similarity(rows[0].float(), rows[1].float(), dim=0)
    assert near > 0.85 > 0.2 > abs(far)
    assert torch.equal(embed(["x", "a"], 512)[1], embed(["y", "a"], 512)[1])


def test_routing_follows_the_words() -> None:
    tokens = words("the cat and the dog and the bird and the fish", 300)
    ids, weights = route(embed(tokens, 64), SHAPE)
    assert ids.shape == weights.shape == (300, 3)
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 10
    assert all(len(set(row)) == 3 for row in ids.tolist())
    assert torch.allclose(weights.sum(1), torch.full((300,), 2.5))
    counts = torch.bincount(ids.flatten(), minlength=10).float()
    assert counts.max() > 1.5 * counts.mean(), "language is skewed"


def test_experts_over_parts_add_up_to_the_whole() -> None:
    rows = embed(words("some text of a few words", 20), 64)
    ids, weights = route(rows, SHAPE)
    whole = run_experts(rows, ids, weights, range(10), 0, SHAPE)
    halves = []
    for first, last in ((0, 4), (4, 10)):
        local = torch.where((ids >= first) & (ids < last), ids - first, -1)
        halves.append(run_experts(rows, local, weights, range(first, last), first, SHAPE))
    assert torch.allclose(whole, halves[0] + halves[1], atol=1e-5)
    gate_up, down = expert_weights(int(ids[0, 0]), SHAPE)
    gate, up = (rows[0].float() @ gate_up.t()).chunk(2)
    one = weights[0, 0] * ((torch.nn.functional.silu(gate) * up) @ down.t())
    assert torch.allclose(run_experts(rows[:1], ids[:1, :1], weights[:1, :1], range(10), 0, SHAPE)[0], one, atol=1e-5)


def test_the_layer_is_the_same_however_many_threads_share_its_experts() -> None:
    rows = embed(words("some text of a few words", 20), 64)
    ids, weights = route(rows, SHAPE)
    ids[3] = -1
    before = torch.get_num_threads()
    whole = run_experts(rows, ids, weights, range(10), 0, SHAPE)
    assert torch.equal(run_layer(rows, ids, weights, SHAPE, 1), whole)
    for threads in (2, 3, 16):
        assert torch.allclose(run_layer(rows, ids, weights, SHAPE, threads), whole, atol=1e-5)
    assert not whole[3].any()
    assert torch.get_num_threads() == before


def test_an_experts_rows_are_taken_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = embed(words("some text of a few words", 20), 64)
    ids, weights = route(rows, SHAPE)
    whole = run_experts(rows, ids, weights, range(10), 0, SHAPE)
    monkeypatch.setattr(workload, "BLOCK_ROWS", 3)
    assert torch.allclose(run_experts(rows, ids, weights, range(10), 0, SHAPE), whole, atol=1e-6)


def test_a_recorded_routing_is_read_and_repeated(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    recorded = np.array([[[0, 1], [2, -1]], [[9, 9], [5, 4]]], dtype=np.int32)
    np.savez(path, topk_idx=recorded)
    ids, weights = read_routing(path, 6, 10)
    assert ids.tolist() == [[0, 1], [2, -1], [9, 9], [5, 4], [0, 1], [2, -1]]
    assert ids.dtype == torch.int64
    assert torch.equal(weights, torch.full((6, 2), 0.5))
    np.savez(path, topk_idx=recorded, topk_weights=np.arange(8).reshape(2, 2, 2))
    assert read_routing(path, 2, 10)[1].tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"other": np.zeros((2, 2), dtype=np.int64)}, "no array topk_idx; it has other"),
        ({"topk_idx": np.zeros((2, 2))}, "whole numbers"),
        ({"topk_idx": np.zeros((0, 2), dtype=np.int64)}, "whole numbers"),
        ({"topk_idx": np.full((2, 2), 10)}, "runs from 10 to 10; -1 to 9"),
        ({"topk_idx": np.full((2, 2), -2)}, "runs from -2 to -2"),
        ({"topk_idx": np.zeros((2, 2), dtype=np.int64), "topk_weights": np.zeros((2, 3))}, "topk_weights is"),
    ],
)
def test_a_routing_that_cannot_be_meant_is_refused(arrays: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    np.savez(path, **arrays)
    with pytest.raises(InvalidArgumentError, match=message):
        read_routing(path, 4, 10)


def test_the_readme_is_the_default_text() -> None:
    assert "Expertwire" in read_text(None)
