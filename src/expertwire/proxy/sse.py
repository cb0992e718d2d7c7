"""Server-sent events: where one ends, and which of them is content. Whole events are relayed or none, so UTF-8 is never split."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

import orjson

DONE_EVENT: Final = b"data: [DONE]\n\n"
# As a key, whatever follows; within a string its first quote would be escaped.
ERROR_NEEDLE: Final = b'"error":'


class EventTooLargeError(Exception):
    """One event is larger than the limit; never leaves this room."""


def whole_until(data: bytes) -> int:
    """Index behind the last complete event of `data`, 0 if there is none. An event ends with an empty line, by LF or CRLF."""
    end = data.rfind(b"\n\n") + 2
    if end < 2:
        end = 0
    if (other := data.rfind(b"\r\n\r\n")) >= 0:
        end = max(end, other + 4)
    return end


class Splitter:
    """Cuts a stream of bytes into whole events."""

    __slots__ = ("_held", "_limit")

    def __init__(self, limit: int) -> None:
        """`limit`: bytes of one event."""
        self._held = b""
        self._limit = limit

    def feed(self, data: bytes) -> bytes:
        """All events that are complete now, as one piece, their ends included; the rest is held. EventTooLargeError past the limit."""
        if self._held:
            data = self._held + data
        end = whole_until(data)
        self._held = data[end:]
        if len(self._held) > self._limit:
            raise EventTooLargeError
        return data if end == len(data) else data[:end]

    @property
    def held(self) -> bytes:
        """What has come of an event that is not complete."""
        return self._held


def events_of(piece: bytes) -> list[bytes]:
    """The events of a piece that `feed` gave, each with its end."""
    if b"\r" in piece:
        piece = piece.replace(b"\r\n", b"\n")
    return [event + b"\n\n" for event in piece.split(b"\n\n") if event.strip(b"\n")]


def data_of(event: bytes) -> bytes:
    """The data of one event: the lines' values joined by LF. b"" for a comment."""
    if event.startswith(b"data: ") and event.find(b"\n") >= len(event) - 2:
        return event[6:].rstrip(b"\n")
    values = []
    for line in event.splitlines():
        if line.startswith(b"data:"):
            value = line[5:]
            values.append(value[1:] if value[:1] == b" " else value)
    return b"\n".join(values)


class Sort(IntEnum):
    """What an event is to the relay."""

    PRELUDE = 0  # a role, a comment, the creation of a response: no content yet
    CONTENT = 1
    ERROR = 2
    END = 3  # the mark of the end: [DONE], or a response that is complete


_RESPONSE_PRELUDES: Final = frozenset(
    {"response.created", "response.queued", "response.in_progress", "response.output_item.added", "response.content_part.added"}
)
_RESPONSE_ENDS: Final = frozenset({"response.completed", "response.incomplete"})
# A chat's delta of any other field is content: `tool_calls`, `reasoning_content`, `reasoning`, `refusal`, `audio`, and what will come.
_DELTA_PRELUDES: Final = frozenset({"role"})


def parse(data: bytes) -> Any:
    """The JSON of an event's data; None if it is none."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None


def sort_of(data: bytes, parsed: Any) -> Sort:
    """What an event is, by its data and what `parse` made of it. Completions, chat and responses tell themselves apart by their shape."""
    if data == b"[DONE]":
        return Sort.END
    if not isinstance(parsed, dict):
        return Sort.PRELUDE if not data else Sort.CONTENT
    if parsed.get("error") or parsed.get("object") == "error":  # the second before vLLM 0.10
        return Sort.ERROR
    if isinstance(kind := parsed.get("type"), str) and "choices" not in parsed:
        if kind in ("error", "response.failed"):
            return Sort.ERROR
        if kind in _RESPONSE_ENDS:
            return Sort.END
        return Sort.PRELUDE if kind in _RESPONSE_PRELUDES else Sort.CONTENT
    choices = parsed.get("choices")
    if not isinstance(choices, list) or not choices:
        return Sort.PRELUDE  # usage alone, or something unknown: no token
    for choice in choices:
        if not isinstance(choice, dict) or choice.get("finish_reason") is not None:
            return Sort.CONTENT
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return Sort.CONTENT  # completions: any text, the empty one too: half of a character has none yet
        if any(value not in (None, "", []) for field, value in delta.items() if field not in _DELTA_PRELUDES):
            return Sort.CONTENT
    return Sort.PRELUDE


def error_of(parsed: Any) -> tuple[int, dict[str, Any]]:
    """(HTTP status, error object) of an event that is an error: its `code` where that is one of 400 to 599, else 500."""
    error: Any = parsed.get("error") if isinstance(parsed, dict) else None
    if not isinstance(error, dict) and isinstance(parsed, dict) and isinstance(response := parsed.get("response"), dict):
        error = response.get("error")
    if error is None and isinstance(parsed, dict) and parsed.get("object") == "error":
        error = parsed
    if not isinstance(error, dict):
        message = parsed.get("message") if isinstance(parsed, dict) else None
        message = message if isinstance(message, str) else str(error or "the server reported an error")
        error = {"message": message, "type": "upstream_error", "param": None, "code": 500}
    code = error.get("code")
    return (code if isinstance(code, int) and not isinstance(code, bool) and 400 <= code < 600 else 500), error


def with_data(event: bytes, data: bytes) -> bytes:
    """The event with other data, of one line; its other lines stay."""
    others = [line for line in event.splitlines() if line and not line.startswith(b"data:")]
    return b"".join([line + b"\n" for line in others]) + b"data: %b\n\n" % data
