"""Requests as a plain client sends them, over http.client: status, choices and how a stream ended."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

DEADLINE_S = 180.0


@dataclass
class Choice:
    """What one choice came to."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Reply:
    """One answer. `ended`: whole, by its framing and, where it streams, with [DONE]."""

    status: int
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    error: Any = None
    ended: bool = False
    events: int = 0
    body: bytes = b""

    def same_as(self, truth: Reply) -> bool:
        """Whether choices and counts of tokens are those of another whole answer."""
        counts = ("prompt_tokens", "completion_tokens")
        return (
            self.status == truth.status == 200
            and self.ended
            and self.error is None
            and self.choices == truth.choices
            and all(self.usage.get(name) == truth.usage.get(name) for name in counts)
        )


def path_of(body: dict[str, Any]) -> str:
    """Where a body goes."""
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


class Open:
    """A request that has been sent. `events()` gives what streams, `close()` leaves."""

    def __init__(self, port: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        data = json.dumps(body).encode()
        self.connection.request("POST", path_of(body), data, {"content-type": "application/json", **(headers or {})})
        self.response = self.connection.getresponse()
        self.reply = Reply(self.response.status)

    def events(self) -> Iterator[dict[str, Any]]:
        """Each event of a stream, added to `reply`."""
        while line := self.response.readline():
            word, _, data = line.strip().partition(b": ")
            if word != b"data":
                continue
            if data == b"[DONE]":
                self.reply.ended = not self.response.readline().strip() and not self.response.read()
                return
            event = json.loads(data)
            self.reply.events += 1
            _add(self.reply, event)
            yield event

    def close(self) -> None:
        """Leave, whatever is still to come."""
        self.response.close()
        self.connection.close()


def ask(port: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Reply:
    """One request to its end. A connection that breaks off gives `ended` False; that nobody listens is an OSError."""
    opened = Open(port, body, headers)
    try:
        if body.get("stream") and opened.reply.status == 200:
            for _ in opened.events():
                pass
            return opened.reply
        opened.reply.body = opened.response.read()
        opened.reply.ended = True
        if "json" in (opened.response.getheader("content-type") or ""):
            _add(opened.reply, json.loads(opened.reply.body))
    except (http.client.HTTPException, OSError):
        opened.reply.ended = False
    finally:
        opened.close()
    return opened.reply


def _add(reply: Reply, event: dict[str, Any]) -> None:
    if "error" in event:
        reply.error = event["error"]
    reply.usage.update(event.get("usage") or {})
    for found in event.get("choices") or ():
        choice = reply.choices.setdefault(found["index"], Choice())
        message = found.get("message") or found.get("delta") or {}
        choice.text += found.get("text") or message.get("content") or ""
        choice.token_ids += found.get("token_ids") or ()
        choice.finish_reason = found.get("finish_reason") or choice.finish_reason


def get(port: int, path: str) -> tuple[int, str]:
    """Status and text; (0, why) where nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    except (http.client.HTTPException, OSError) as error:
        return 0, str(error)
    finally:
        connection.close()


def metric(text: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have those labels, in Prometheus' text; 0 where there are none."""
    total = 0.0
    for line in text.splitlines():
        found = re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", line)
        if found is not None and found[1] == name and all(f'{key}="{value}"' in (found[2] or "") for key, value in labels.items()):
            total += float(found[3])
    return total
