"""A client's body as legs: which way it goes, into how many it is split, and what P and D are sent for each.

Nothing is validated here that a server validates: what is odd goes to P as it came, and P's refusal comes back as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import orjson

from expertwire.proxy import faults, params
from expertwire.proxy.faults import Fault

TEXT_BYTES_PER_TOKEN: Final = 4  # a guess, used for the threshold below which D computes alone, and for nothing else


DEPTH_MAX: Final = 254  # what orjson writes; it reads deeper
SEED_MAX: Final = 2**63 - 1  # the largest that vLLM takes; what would be beyond goes on at the other end
_TRUE: Final = frozenset({"1", "t", "true", "on", "y", "yes"})


class Shape(IntEnum):
    """What sort of request it is."""

    COMPLETIONS = 0
    CHAT = 1
    RESPONSES = 2
    RESPONSE_BY_ID = 3  # /v1/responses/{id}…: to the D that made it
    PLAIN = 4  # all the rest: to a D


# CPython 3.11 takes a member from its enum by a hook, for 90 ns.
_COMPLETIONS, _CHAT, _RESPONSES = Shape.COMPLETIONS, Shape.CHAT, Shape.RESPONSES
TWO_LEGS: Final = frozenset({Shape.COMPLETIONS, Shape.CHAT, Shape.RESPONSES})
_TWO_LEG_PATHS: Final = {
    b"/v1/completions": Shape.COMPLETIONS,
    b"/v1/chat/completions": Shape.CHAT,
    b"/v1/responses": Shape.RESPONSES,
}
_BY_ID: Final = b"/v1/responses/"


def shape_of(method: bytes, path: bytes) -> Shape:
    """By method and path (without query)."""
    if method == b"POST" and (shape := _TWO_LEG_PATHS.get(path)) is not None:
        return shape
    return Shape.RESPONSE_BY_ID if path.startswith(_BY_ID) and len(path) > len(_BY_ID) else Shape.PLAIN


def response_id_of(path: bytes) -> bytes:
    """`resp_1` of `/v1/responses/resp_1/cancel`."""
    return path[len(_BY_ID) :].partition(b"/")[0]


@dataclass(frozen=True, slots=True)
class Rules:
    """What of the configuration decides how a body is split."""

    split_batches: bool = True
    alone_below_tokens: int = 0
    reuse_tokens: bool = True
    max_branches: int = 128


@dataclass(slots=True)
class Plan:
    """What is to be done with one body. Branch `i` is choice `i % n` of prompt `i // n`."""

    shape: Shape
    raw: bytes
    body: dict[str, Any]
    stream: bool
    stripped: bool = False  # the raw bytes had kv_transfer_params: never pass them on
    alone: str = ""  # why D computes everything, "" if it does not
    prompts: Sequence[Any] = ()  # of a batch that is split; empty: the body has one
    n: int = 1
    branches: int = 1  # into how many pairs of legs it is split
    include_usage: bool = False
    reuse_tokens: bool = False


# Without one of these a body has nothing of what is looked for below, and most bodies have none: one look in place of ten.
_UNUSUAL: Final = frozenset(
    {
        params.NAME,
        *params.CARRIERS,
        "stream_options",
        "prompt_logprobs",
        "use_beam_search",
        "truncate_prompt_tokens",
        "echo",
        "best_of",
        "prompt_embeds",
        "previous_response_id",
        "background",
        "tools",
    }
)


def plan_of(shape: Shape, raw: bytes, rules: Rules) -> Plan | Fault:
    """Read a body for both legs. A Fault if it is not a JSON object, or has more branches than allowed."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return faults.bad_request(f"the body is not valid JSON: {error.msg} at byte {error.pos}")
    if not isinstance(body, dict):
        return faults.bad_request("the body is JSON, but no object")
    if raw.count(b"[") + raw.count(b"{") > DEPTH_MAX and not _can_be_written(body):
        return faults.bad_request(f"the body is nested deeper than {DEPTH_MAX} levels")
    plan = Plan(shape, raw, body, _flag(body.get("stream")))
    if not _UNUSUAL.isdisjoint(body):
        plan.stripped = params.strip_request(body)
        options = body.get("stream_options")
        plan.include_usage = isinstance(options, dict) and _flag(options.get("include_usage"))
        plan.alone = _why_alone(shape, body)
        if plan.alone:
            return plan
    prompts = _batch(body.get("prompt")) if shape is _COMPLETIONS else None
    n = body.get("n") if shape is not _RESPONSES else None
    if n is None:
        n = 1
    elif (n := _number(n)) is None or n < 1:  # P would not refuse it, for it is sent another
        return faults.bad_request(f"n is {body['n']!r:.100}; it must be a whole number, and 1 at least", "n")
    if prompts or n > 1:
        if not rules.split_batches:
            plan.alone = "batch"
            return plan
        count = max(1, len(prompts or ())) * n
        if count > rules.max_branches:
            message = f"{count} choices (prompts times n) were asked for, and this server's limit is {rules.max_branches}"
            return faults.bad_request(message, "n" if n > 1 else "prompt")
        plan.prompts, plan.n, plan.branches = prompts or (), n, count
    if rules.alone_below_tokens and _tokens_about(body) < rules.alone_below_tokens:
        plan.alone, plan.prompts, plan.n, plan.branches = "short", (), 1, 1
        return plan
    plan.reuse_tokens = rules.reuse_tokens and shape is _CHAT and _only_text(body.get("messages"))
    return plan


def _number(value: Any) -> int | None:
    """A whole number as vLLM's fields (pydantic, not strict) read one: 2, 2.0, "2"; else None. What we did not see as one, D would."""
    if isinstance(value, int):
        return int(value)
    if not isinstance(value, str | float):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if not number.is_integer():
        return None
    try:
        return int(value)
    except ValueError:  # "2.0"
        return int(number)


def _flag(value: Any) -> bool:
    """Whether vLLM's fields read this as true: true, 1, "yes" …"""
    if value is True or value is False or value is None:
        return value is True
    return value.lower() in _TRUE if isinstance(value, str) else isinstance(value, int | float) and value == 1


def _can_be_written(body: dict[str, Any]) -> bool:
    try:
        orjson.dumps(body)
    except orjson.JSONEncodeError:
        return False
    return True


def _why_alone(shape: Shape, body: dict[str, Any]) -> str:
    """What D would compute anew whatever P sent, or what P and D would not see alike."""
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if body.get("use_beam_search"):
        return "beam_search"
    truncated = _number(body.get("truncate_prompt_tokens"))
    if truncated is not None and truncated < 0:
        return "truncation"  # to what the model takes less max_tokens, which the legs do not have in common
    if shape is Shape.COMPLETIONS:
        # `logprobs: 0` asks for them too.
        if body.get("echo") and body.get("logprobs") is not None:
            return "echo_logprobs"
        best_of = _number(body.get("best_of"))
        if best_of is not None and best_of > 1:
            return "best_of"
        if body.get("prompt_embeds") is not None:
            return "prompt_embeds"
    elif shape is Shape.CHAT:
        if body.get("echo") and body.get("logprobs"):
            return "echo_logprobs"
    else:
        if body.get("previous_response_id") is not None:
            return "previous_response"
        if body.get("background"):
            return "background"
        tools = body.get("tools")
        if isinstance(tools, list) and any(not isinstance(tool, dict) or tool.get("type") != "function" for tool in tools):
            return "server_tools"  # D asks the model several times, and parameters serve once
    return ""


def _batch(prompt: Any) -> list[Any] | None:
    """The prompts of a batch; None if there is one, or if P shall say what is wrong with it."""
    if not isinstance(prompt, list) or len(prompt) < 2:
        return None
    if all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
        return prompt
    return None


def _tokens_about(body: dict[str, Any]) -> int:
    """Tokens of the longest prompt: counted where they are given, else guessed."""
    prompt = body.get("prompt", body.get("input"))
    if isinstance(prompt, str):
        return len(prompt) // TEXT_BYTES_PER_TOKEN
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], int):
            return len(prompt)
        if all(isinstance(item, str) for item in prompt):
            return max(len(item) for item in prompt) // TEXT_BYTES_PER_TOKEN
        if all(isinstance(item, list) for item in prompt):
            return max(len(item) for item in prompt)
    return len(orjson.dumps(body.get("messages", prompt))) // TEXT_BYTES_PER_TOKEN


def _only_text(messages: Any) -> bool:
    """Images and sound need D's own reading of the messages: token ids do not hold them."""
    if not isinstance(messages, list):
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else message
        if isinstance(content, list):
            if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
                return False
        elif content is not None and not isinstance(content, str):
            return False
    return True


def _of_branch(plan: Plan, branch: int) -> dict[str, Any]:
    """The client's body for one choice of one prompt."""
    body = plan.body.copy()
    if plan.branches == 1:
        return body
    if plan.prompts:
        body["prompt"] = plan.prompts[branch // plan.n]
    if plan.n > 1:
        body["n"] = 1
        seed = _number(body.get("seed"))
        if seed is not None and seed <= SEED_MAX:
            seed += branch % plan.n  # as vLLM seeds the choices of one request
            body["seed"] = seed if seed <= SEED_MAX else seed - 2**64
    return body


# P's one token is thrown away: nothing may make it fail, and nothing may make it an end, for with "stop" P hands out no parameters.
_NOT_FOR_P: Final = frozenset({"stream_options", "min_tokens", "stop", "stop_token_ids"})


def prefill_body(plan: Plan, branch: int) -> bytes:
    """What P is sent."""
    body = _of_branch(plan, branch)
    if not _NOT_FOR_P.isdisjoint(body):
        for name in _NOT_FOR_P:
            body.pop(name, None)
    body["stream"] = False
    if plan.shape is _RESPONSES:
        body["max_output_tokens"] = 1
        if "store" in body:
            body["store"] = False
    else:
        body["max_tokens"] = 1
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        body["n"] = 1
        body["ignore_eos"] = True
        if plan.reuse_tokens:
            body["return_token_ids"] = True
    body[params.NAME] = params.ask()
    return orjson.dumps(body)


def decode_body(plan: Plan, branch: int, values: dict[str, Any] | None) -> bytes:
    """What D is sent: the client's body and P's parameters (None: none). Byte for byte the client's where nothing has to be changed."""
    if plan.branches > 1 or plan.stripped or not plan.body:
        body = _of_branch(plan, branch)
        if values is not None:
            body[params.NAME] = values
        return orjson.dumps(body)
    if values is None:
        return plan.raw
    # orjson has read it as an object, so behind its last brace there is only white space.
    end = plan.raw.rindex(b"}")
    return b"".join((plan.raw[:end], b',"kv_transfer_params":', orjson.dumps(values), b"}"))


def plain_body(raw: bytes) -> bytes:
    """The body of an endpoint that is passed on: without kv_transfer_params at any depth if it is JSON that has them."""
    if not params.may_carry(raw):
        return raw
    try:
        body = orjson.loads(raw)
        return orjson.dumps(body) if params.strip_everywhere(body) else raw
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        # D's reader is laxer than ours (NaN), and what it would find there could end its engine.
        return params.disguise(raw)
