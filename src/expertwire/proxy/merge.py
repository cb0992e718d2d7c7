"""Answers of several branches as one: choices in order, each prompt counted once, streams interleaved as they come."""

from __future__ import annotations

from typing import Any

import orjson

from expertwire.proxy import params

Usage = dict[str, Any]


def with_cached(reply: dict[str, Any], cached: Usage | None) -> bool:
    """Put P's count of cached tokens in the place of D's, for which all that P computed is cached. In place; True if something changed."""
    usage = reply.get("usage")
    if usage is None and isinstance(response := reply.get("response"), dict):
        usage = response.get("usage")
    if cached is None or not isinstance(usage, dict):
        return False
    name = "input_tokens_details" if "input_tokens" in usage else "prompt_tokens_details"
    usage[name] = cached
    return True


def single_reply(body: bytes, reply: dict[str, Any], cached: Usage | None) -> bytes:
    """D's reply (`reply` is `body`, read) as the client gets it: byte for byte, where there is nothing to take out or put right."""
    if cached is not None and with_cached(reply, cached):
        params.strip_everywhere(reply)
        return orjson.dumps(reply)
    return params.strip_reply(body)


def usage_of(usages: list[Usage | None], cached: list[Usage | None], n: int) -> Usage | None:
    """One usage of all branches: tokens of a prompt count once, with its first choice. None if no branch told any."""
    if not any(usages):
        return None
    prompt = completion = hits = 0
    counted = False
    for index, usage in enumerate(usages):
        if not isinstance(usage, dict):
            continue
        completion += _number(usage.get("completion_tokens"))
        if index % n == 0:
            prompt += _number(usage.get("prompt_tokens"))
            details = cached[index] or usage.get("prompt_tokens_details")
            if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
                hits += details["cached_tokens"]
                counted = True
    merged: Usage = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    merged["prompt_tokens_details"] = {"cached_tokens": hits} if counted else None
    return merged


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def replies(parts: list[dict[str, Any]], cached: list[Usage | None], n: int, request_id: str) -> bytes:
    """The replies of all branches, in order, as one. KeyError or TypeError if one of them has not one choice as it should."""
    merged = dict(parts[0])
    merged.pop(params.NAME, None)
    merged["id"] = shared_id(merged.get("id"), request_id)
    choices = []
    for index, part in enumerate(parts):
        (choice,) = part["choices"] if len(part["choices"]) == 1 else part["choices"][:1]
        choice["index"] = index
        choices.append(choice)
    merged["choices"] = choices
    merged["usage"] = usage_of([part.get("usage") for part in parts], cached, n)
    return orjson.dumps(merged)


def shared_id(value: Any, request_id: str) -> Any:
    """The id of a branch's reply without its branch's number: vLLM makes it of the request id that the leg had."""
    at = value.find(request_id) if isinstance(value, str) else -1
    return value[: at + len(request_id)] if at >= 0 else value


class StreamMerge:
    """Events of several streams as those of one."""

    __slots__ = ("_base", "_cached", "_include_usage", "_n", "_request_id", "_usages")

    def __init__(self, branches: int, n: int, include_usage: bool, request_id: str) -> None:
        self._usages: list[Usage | None] = [None] * branches
        self._cached: list[Usage | None] = [None] * branches
        self._n = n
        self._base: dict[str, Any] = {}
        self._include_usage = include_usage
        self._request_id = request_id

    def cached(self, branch: int, details: Usage | None) -> None:
        """P's count of cached tokens of a branch."""
        self._cached[branch] = details

    def event(self, branch: int, parsed: Any) -> bytes:
        """One event of a branch, as the client gets it; b"" if it only counts tokens."""
        if not isinstance(parsed, dict):
            return b""
        if not self._base:
            self._base = {name: value for name, value in parsed.items() if name not in ("choices", "usage", params.NAME)}
            self._base["id"] = shared_id(parsed.get("id"), self._request_id)
        parsed.pop(params.NAME, None)
        if isinstance(usage := parsed.get("usage"), dict):
            self._usages[branch] = usage
        choices = parsed.get("choices")
        if not isinstance(choices, list) or not choices:
            return b""
        for choice in choices:
            if isinstance(choice, dict):
                choice["index"] = branch
        for name in ("id", "created"):
            if name in self._base:
                parsed[name] = self._base[name]
        return b"data: %b\n\n" % orjson.dumps(parsed)

    def end(self) -> bytes:
        """What comes when every branch has ended: the usage, if it was asked for, and the mark of the end."""
        tail = b"data: [DONE]\n\n"
        if not self._include_usage or (usage := usage_of(self._usages, self._cached, self._n)) is None:
            return tail
        return b"data: %b\n\n%b" % (orjson.dumps(self._base | {"choices": [], "usage": usage}), tail)
