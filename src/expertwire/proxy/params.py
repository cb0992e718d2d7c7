"""The one file that knows `kv_transfer_params`: asked of P, checked, carried to D once, stripped from what clients send and get.

What P hands out is forwarded as it is: it grows with each version of vLLM. Checked is only what D dies of if it is missing.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import orjson

from expertwire.errors import StateError

NAME: Final = "kv_transfer_params"
NEEDLE: Final = b"kv_transfer_params"
# As JSON may write it: any character escaped.
_WRITTEN: Final = re.compile(
    b"".join(
        b"(?:%c|\\\\u00%s)" % (code, b"".join(b"[%c%c]" % (digit, digit - 32) if digit > 96 else b"%c" % digit for digit in b"%02x" % code))
        for code in NEEDLE
    )
)
_OTHER: Final = b"kv_transfer_paramz"
# As vLLM dumps a reply's field that was not set. With its quotes unescaped it cannot be part of a string, so it may be cut out as bytes.
_UNSET: Final = (b',"kv_transfer_params":null', b', "kv_transfer_params": null')
# Where vLLM passes a client's dict on into the same place: {"vllm_xargs": {"kv_transfer_params": …}} reaches the connector too.
CARRIERS: Final = ("vllm_xargs", "extra_args")

_ASK: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

# A model that no server has: D refuses within milliseconds, and in doing so frees the blocks at P.
RELEASE_MODEL: Final = "expertwire-release-no-such-model"


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_port(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 65536


def _is_blocks(value: object) -> bool:
    """A list for each group of layers, not all of them empty (of older versions: numbers).

    P always holds a block: also one that is not full is handed out, and one that was in its cache already. Given none, D's scheduler (vLLM
    0.32, nixl/pull_scheduler.py) asks for the prompt's blocks all the same, finds none to fetch, and its assertion ends the engine.
    """
    return isinstance(value, list) and any(group != [] for group in value)


_NEEDED: Final = (
    ("do_remote_prefill", lambda value: value is True),
    ("remote_block_ids", _is_blocks),
    ("remote_engine_id", _is_text),
    ("remote_request_id", _is_text),
    ("remote_host", _is_text),
    ("remote_port", _is_port),
)


def ask() -> dict[str, Any]:
    """What P's leg carries."""
    return dict(_ASK)


def missing(reply: dict[str, Any]) -> str:
    """The first field that P's answer lacks or has in a shape that D cannot use, by its path; "" if there is none."""
    params = reply.get(NAME)
    if not isinstance(params, dict):
        return NAME
    host, port, engine, request = map(params.get, ("remote_host", "remote_port", "remote_engine_id", "remote_request_id"))
    if host and engine and request and type(host) is type(engine) is type(request) is str and type(port) is int and 0 < port < 65536:
        if params.get("do_remote_prefill") is True and type(blocks := params.get("remote_block_ids")) is list and blocks and blocks[0]:
            return ""  # as nearly all are; else which field it is
    for field, fits in _NEEDED:
        if not fits(params.get(field)):
            return f"{NAME}.{field}"
    return ""


class Parameters:
    """What one prefill handed out: given away once."""

    __slots__ = ("_values", "cached", "token_ids")

    def __init__(self, reply: dict[str, Any], token_ids: list[int] | None) -> None:
        """`reply`: P's, for which `missing` said "". `token_ids`: the prompt's, if D shall not tokenise again."""
        self._values: dict[str, Any] | None = reply[NAME]
        self.token_ids = token_ids
        self.cached = cached_tokens(reply)

    def take(self) -> dict[str, Any]:
        """The values for D; a second call raises StateError, for parameters used twice give wrong tokens with status 200."""
        if (values := self._values) is None:
            raise StateError("these kv_transfer_params have been used; prefill again")
        self._values = None
        if self.token_ids is not None:
            values["prompt_token_ids"] = self.token_ids
        return values

    def release_body(self) -> bytes:
        """The request that D refuses and by which P's blocks are freed; uses the parameters up as `take` does."""
        self.token_ids = None
        return orjson.dumps({"model": RELEASE_MODEL, "prompt": [1], "max_tokens": 1, NAME: self.take()})


def cached_tokens(reply: dict[str, Any]) -> dict[str, Any] | None:
    """`prompt_tokens_details` (of responses: `input_tokens_details`) of a reply's usage, None if it has none."""
    usage = reply.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return details if isinstance(details, dict) else None


def may_carry(body: bytes) -> bool:
    """False if no reading of the JSON `body` has the name, escapes included. (UTF-16 and UTF-32 begin with a zero byte among four.)"""
    return NEEDLE in body or b"\\u" in body or b"\0" in body[:4]


def disguise(body: bytes) -> bytes:
    """A client's body that we cannot read with another name in the place of ours, wherever a laxer reader would find it.

    Python's `json.loads`, which D reads with, takes NaN, half a surrogate pair, deeper nesting, and UTF-16 and UTF-32.
    """
    encoding = json.detect_encoding(body)
    try:
        text = body if encoding.startswith("utf-8") else body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return body  # D cannot read it either
    return _WRITTEN.sub(_OTHER, text) if _WRITTEN.search(text) else body


def strip_request(body: dict[str, Any]) -> bool:
    """Take the name out of a client's body, where vLLM would read it, in place; True if it was there."""
    found = body.pop(NAME, None) is not None
    for carrier in CARRIERS:
        inner = body.get(carrier)
        if isinstance(inner, dict) and inner.pop(NAME, None) is not None:
            found = True
    return found


def strip_everywhere(value: Any) -> bool:
    """Take the name out at every depth, in place; True if it was there. For bodies of endpoints that are only passed on."""
    found, pending = False, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            if NAME in item:
                del item[NAME]
                found = True
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
    return found


def strip_reply(body: bytes) -> bytes:
    """A JSON reply of 2xx without the name. What is not JSON comes back as it is, if it does not have the name."""
    for unset in _UNSET:
        body = body.replace(unset, b"")
    if NEEDLE not in body:
        return body
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.replace(NEEDLE, b"")
    return orjson.dumps(reply) if strip_everywhere(reply) else body


def redact(body: bytes, given: dict[str, Any] | None) -> bytes:
    """An error body of D: verbatim, unless it repeats the parameters that it was `given` (validation errors quote the request)."""
    if NEEDLE not in body or given is None:
        return body
    for field in ("remote_host", "remote_engine_id", "remote_request_id"):
        body = body.replace(str(given[field]).encode(), b"-")
    return body
