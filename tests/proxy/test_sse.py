"""Events: where they end, however they are cut, and which are content."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertwire.proxy import sse
from expertwire.proxy.sse import Sort
from proxy.world import DONE, ROLE, delta_event, text_event

STREAM = b": ping\n\n" + ROLE + delta_event({"content": "日本語 ü 🙂"}) + b"event: x\ndata: 1\ndata: 2\n\n" + text_event("b") + DONE


@given(st.lists(st.integers(0, len(STREAM)), max_size=12), st.booleans())
@settings(max_examples=150, deadline=None)
def test_however_it_is_cut_whole_events_come_out(cuts: list[int], crlf: bool) -> None:
    stream = STREAM.replace(b"\n", b"\r\n") if crlf else STREAM
    splitter, out = sse.Splitter(1 << 20), []
    edges = [0, *sorted(cuts), len(stream)]
    for start, end in pairwise(edges):
        piece = splitter.feed(stream[start:end])
        piece.decode("utf-8", "strict")  # never within a character
        out.append(piece)
    assert b"".join(out) == stream
    assert splitter.held == b""
    assert [sse.data_of(event) for event in sse.events_of(b"".join(out))] == [sse.data_of(event) for event in sse.events_of(STREAM)]


def test_every_single_byte() -> None:
    splitter = sse.Splitter(1 << 20)
    assert b"".join(splitter.feed(STREAM[i : i + 1]) for i in range(len(STREAM))) == STREAM


def test_an_event_has_a_limit() -> None:
    splitter = sse.Splitter(100)
    splitter.feed(b"data: " + b"x" * 94)
    with pytest.raises(sse.EventTooLargeError):
        splitter.feed(b"x")


def test_the_data_of_an_event() -> None:
    assert sse.data_of(b"data: {}\n\n") == b"{}"
    assert sse.data_of(b"data:{}\n\n") == b"{}"
    assert sse.data_of(b"event: a\ndata: 1\ndata: 2\nid: 3\n\n") == b"1\n2"
    assert sse.data_of(b": comment\n\n") == b""
    assert sse.with_data(b"event: a\nid: 3\ndata: 1\n\n", b"2") == b"event: a\nid: 3\ndata: 2\n\n"


def chunk(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": None} | choice]}


@pytest.mark.parametrize(
    ("parsed", "sort"),
    [
        (chunk(delta={"role": "assistant", "content": ""}), Sort.PRELUDE),
        (chunk(delta={"role": "assistant", "content": "", "reasoning_content": None}), Sort.PRELUDE),
        (chunk(delta={"role": "assistant", "content": "a"}), Sort.CONTENT),
        (chunk(delta={"content": "a"}), Sort.CONTENT),
        (chunk(delta={"reasoning_content": "a"}), Sort.CONTENT),
        (chunk(delta={"reasoning": "a"}), Sort.CONTENT),
        (chunk(delta={"tool_calls": [{"index": 0}]}), Sort.CONTENT),
        (chunk(delta={"tool_calls": []}), Sort.PRELUDE),
        (chunk(delta={}), Sort.PRELUDE),
        (chunk(delta={}, finish_reason="stop"), Sort.CONTENT),
        (chunk(text=""), Sort.CONTENT),
        ({"choices": [], "usage": {"prompt_tokens": 1}}, Sort.PRELUDE),
        ({"error": {"message": "no"}}, Sort.ERROR),
        ({"object": "error", "message": "no", "type": "BadRequestError", "code": 400}, Sort.ERROR),
        ({"error": None} | chunk(delta={"content": "a"}), Sort.CONTENT),
        ({"type": "response.created", "response": {"error": None}}, Sort.PRELUDE),
        ({"type": "response.in_progress"}, Sort.PRELUDE),
        ({"type": "response.output_item.added"}, Sort.PRELUDE),
        ({"type": "response.output_text.delta", "delta": "a"}, Sort.CONTENT),
        ({"type": "response.reasoning_text.delta", "delta": "a"}, Sort.CONTENT),
        ({"type": "response.completed"}, Sort.END),
        ({"type": "response.incomplete"}, Sort.END),
        ({"type": "response.failed", "response": {"error": {"message": "no"}}}, Sort.ERROR),
        ({"type": "error", "message": "no"}, Sort.ERROR),
    ],
)
def test_what_an_event_is(parsed: Any, sort: Sort) -> None:
    assert sse.sort_of(orjson.dumps(parsed), parsed) is sort


def test_what_is_no_json() -> None:
    assert sse.sort_of(b"[DONE]", None) is Sort.END
    assert sse.sort_of(b"", None) is Sort.PRELUDE
    assert sse.parse(b"{") is None
    assert sse.sort_of(b"{", None) is Sort.CONTENT


@pytest.mark.parametrize(
    ("parsed", "status", "message"),
    [
        ({"error": {"message": "no", "code": 400}}, 400, "no"),
        ({"error": {"message": "no", "code": "bad"}}, 500, "no"),
        ({"error": {"message": "no", "code": 200}}, 500, "no"),
        ({"error": {"message": "no", "code": True}}, 500, "no"),
        ({"error": "just text"}, 500, "just text"),
        ({"object": "error", "message": "no", "type": "BadRequestError", "code": 400}, 400, "no"),
        ({"type": "error", "message": "no"}, 500, "no"),
        ({"type": "response.failed", "response": {"error": {"message": "no", "code": 503}}}, 503, "no"),
        (None, 500, "the server reported an error"),
    ],
)
def test_the_status_of_an_error(parsed: Any, status: int, message: str) -> None:
    found, error = sse.error_of(parsed)
    assert (found, error["message"]) == (status, message)
