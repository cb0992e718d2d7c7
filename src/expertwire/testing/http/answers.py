"""What a fake vLLM server says, as JSON objects: tokens that follow from the prompt, in the shapes of each API. Pure.

Token k of a choice is a hash of (prompt's tokens, seed, k), so that whoever asked can know the text that one server alone would have given;
pieces of several bytes of UTF-8 are among them. Without a seed every choice has the same text, as at temperature 0.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

MODEL = "fake/model"
MAX_TOKENS = 16  # where the caller names no limit
MODEL_LENGTH = 2048
PIECES = (" the", " a", "é", "日本", " 🙂", "ß ", "\n", ' "quoted"', "\\", " end", " Ω", "data: ", " of", " and", "x", "…")
CREATED = 1_796_000_000


class Api(StrEnum):
    """Which of the generating endpoints."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"


@dataclass(frozen=True)
class Refusal(Exception):  # noqa: N818  (raised, and answered; nothing that a caller of the package meets)
    """An answer of 4xx or 5xx in vLLM's shape."""

    status: int
    message: str
    param: str | None = None

    def body(self) -> dict[str, Any]:
        """`{"error": …}`."""
        kind = {400: "BadRequestError", 404: "NotFoundError"}.get(self.status, "InternalServerError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


@dataclass(frozen=True)
class Choice:
    """One text to be made."""

    index: int
    prompt: tuple[int, ...]
    prompt_text: str
    pieces: tuple[str, ...]
    finish: str


@dataclass(frozen=True)
class Job:
    """A request that was understood."""

    api: Api
    ident: str  # as in the answer
    stream: bool
    usage_in_stream: bool
    count: int  # n
    prompts: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    max_tokens: int
    seed: int | None
    echo: bool
    logprobs: bool
    prompt_logprobs: bool
    token_ids: bool
    ignore_eos: bool
    params: dict[str, Any] | None = field(default=None)  # kv_transfer_params

    @property
    def prefills(self) -> bool:
        """Asked to hold its blocks for another server."""
        return bool(self.params and self.params.get("do_remote_decode"))

    @property
    def pulls(self) -> bool:
        """Told to fetch blocks from another server."""
        return bool(self.params and self.params.get("do_remote_prefill"))

    @property
    def recomputes(self) -> bool:
        """Logprobs of the prompt come of computing it, so that what was prefilled elsewhere is wasted."""
        return self.prompt_logprobs or (self.echo and self.logprobs)


def tokens_of(text: str) -> tuple[int, ...]:
    """A token a word."""
    return tuple(zlib.crc32(word.encode()) & 0xFFFFF for word in text.split()) or (0,)


def text_of_chat(messages: Any) -> str:
    """A chat as the text that it becomes before it is cut into tokens."""
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise Refusal(400, "messages must be a list of objects", "messages")
    return " ".join(f"<{message.get('role')}> {message.get('content')}" for message in messages) + " <assistant>"


def pieces_of(prompt: tuple[int, ...], seed: int | None, count: int, salt: str = "") -> tuple[str, ...]:
    """`count` tokens of text; `salt` makes wrong ones."""
    base = f"{prompt}|{seed}|{salt}|".encode()
    found = tuple(PIECES[blake2b(base + b"%d" % k, digest_size=1).digest()[0] % len(PIECES)] for k in range(count))
    return tuple(f"WRONG{k} " for k in range(count)) if salt else found


def _whole(body: dict[str, Any], name: str, least: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise Refusal(400, f"{name} must be at least {least}, got {value}.", name)
    return value


def understand(api: Api, body: Any, request_id: str) -> Job:
    """Raises `Refusal` for what vLLM refuses."""
    if not isinstance(body, dict):
        raise Refusal(400, "the body is no JSON object")
    if body.get("model", MODEL) != MODEL:
        raise Refusal(404, f"The model `{body['model']}` does not exist.", "model")
    limit = _limit(api, body)
    least = _whole(body, "min_tokens", 0) or 0
    if least > limit:
        raise Refusal(400, f"min_tokens must be less than or equal to max_tokens={limit}, got {least}.", "min_tokens")
    stream = bool(body.get("stream"))
    options = body.get("stream_options")
    if options is not None and not stream:
        raise Refusal(400, "Stream options can only be defined when `stream=True`.", "stream_options")
    texts, prompts = _prompts(api, body)
    if (longest := max(len(prompt) for prompt in prompts) + limit) > MODEL_LENGTH:
        raise Refusal(400, f"This model's maximum context length is {MODEL_LENGTH} tokens; this has {longest}.", "prompt")
    params = body.get("kv_transfer_params")
    if params and params.get("prompt_token_ids"):
        prompts = (tuple(params["prompt_token_ids"]),)
    prefix = {Api.COMPLETIONS: "cmpl", Api.CHAT: "chatcmpl", Api.RESPONSES: "resp"}[api]
    return Job(
        api, f"{prefix}-{request_id}", stream, bool(options and options.get("include_usage")), _whole(body, "n", 1) or 1, prompts, texts,
        limit, body.get("seed"), bool(body.get("echo")), body.get("logprobs") not in (None, False),
        body.get("prompt_logprobs") is not None, bool(body.get("return_token_ids")), bool(body.get("ignore_eos")), params,
    )  # fmt: skip


def _limit(api: Api, body: dict[str, Any]) -> int:
    if api is Api.RESPONSES:
        return _whole(body, "max_output_tokens", 1) or MAX_TOKENS
    completion = _whole(body, "max_completion_tokens", 1) if api is Api.CHAT else None
    return completion or _whole(body, "max_tokens", 1) or MAX_TOKENS  # the newer word wins, as in vLLM


def _prompts(api: Api, body: dict[str, Any]) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    if api is Api.CHAT:
        text = text_of_chat(body.get("messages"))
        return (text,), (tokens_of(text),)
    prompt = body.get("prompt" if api is Api.COMPLETIONS else "input")
    if api is Api.RESPONSES and isinstance(prompt, list):
        text = text_of_chat(prompt)
        return (text,), (tokens_of(text),)
    if isinstance(prompt, str):
        return (prompt,), (tokens_of(prompt),)
    if isinstance(prompt, list) and prompt:
        if all(isinstance(token, int) for token in prompt):
            return ("",), (tuple(prompt),)
        if all(isinstance(text, str) for text in prompt):
            return tuple(prompt), tuple(tokens_of(text) for text in prompt)
        if all(isinstance(tokens, list) for tokens in prompt):
            return ("",) * len(prompt), tuple(tuple(tokens) for tokens in prompt)
    raise Refusal(400, "the prompt must be a text, tokens, or a list of one of these", "prompt")


def choices_of(job: Job, wrong: frozenset[int] = frozenset(), stops: bool = False) -> list[Choice]:
    """Every text that the job asks for, in order; those of `wrong` are wrong. `stops`: the first token is the end of the text."""
    found = []
    for number, (prompt, text) in enumerate(zip(job.prompts, job.texts, strict=True)):
        for k in range(job.count):
            index = number * job.count + k
            seed = None if job.seed is None else job.seed + k
            stops = stops and not job.ignore_eos
            pieces = pieces_of(prompt, seed, 0 if stops else job.max_tokens, "wrong" if index in wrong else "")
            found.append(Choice(index, prompt, text, pieces, "stop" if stops else "length"))
    return found


def usage(job: Job, choices: list[Choice], cached: int) -> dict[str, Any]:
    """Each prompt counts once."""
    of_prompts, made = sum(len(prompt) for prompt in job.prompts), sum(len(choice.pieces) for choice in choices)
    if job.api is Api.RESPONSES:
        details = {"input_tokens_details": {"cached_tokens": cached}, "output_tokens_details": {"reasoning_tokens": 0}}
        return {"input_tokens": of_prompts, "output_tokens": made, "total_tokens": of_prompts + made, **details}
    counts = {"prompt_tokens": of_prompts, "total_tokens": of_prompts + made, "completion_tokens": made}
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


def _logprobs(job: Job, pieces: tuple[str, ...], offset: int) -> dict[str, Any] | None:
    if not job.logprobs:
        return None
    values = [-0.25 - (zlib.crc32(piece.encode()) % 8) / 8 for piece in pieces]
    if job.api is Api.CHAT:
        told = [{"token": p, "logprob": v, "bytes": list(p.encode()), "top_logprobs": []} for p, v in zip(pieces, values, strict=True)]
        return {"content": told}
    offsets = []
    for piece in pieces:
        offsets.append(offset)
        offset += len(piece)
    tops = [{piece: value} for piece, value in zip(pieces, values, strict=True)]
    return {"text_offset": offsets, "token_logprobs": values, "tokens": list(pieces), "top_logprobs": tops}


def whole(job: Job, choices: list[Choice], cached: int, params: dict[str, Any] | None) -> dict[str, Any]:
    """The answer that is not streamed."""
    if job.api is Api.RESPONSES:
        return response_object(job, "".join(choices[0].pieces), "completed", usage(job, choices, cached)) | {"kv_transfer_params": params}
    told = []
    for choice in choices:
        said, common = "".join(choice.pieces), {"finish_reason": choice.finish, "stop_reason": None}
        if job.api is Api.CHAT:
            one = {"index": choice.index, "message": {"role": "assistant", "content": said, "refusal": None, "tool_calls": []}}
            one["logprobs"] = _logprobs(job, choice.pieces, 0)
        else:
            shown = (choice.prompt_text, *choice.pieces) if job.echo else choice.pieces
            one = {"index": choice.index, "text": "".join(shown), "logprobs": _logprobs(job, shown, 0)}
        if job.prompt_logprobs and job.api is Api.COMPLETIONS:
            one["prompt_logprobs"] = [None, *({str(token): {"logprob": -1.0}} for token in choice.prompt[1:])]
        if job.token_ids:
            one["token_ids"] = [len(piece) for piece in choice.pieces]
            if job.api is Api.COMPLETIONS:
                one["prompt_token_ids"] = list(choice.prompt)
        told.append(one | common)
    found = _common(job, "chat.completion" if job.api is Api.CHAT else "text_completion", told)
    if job.api is Api.CHAT and job.token_ids:
        found["prompt_token_ids"] = list(job.prompts[0])
    return found | {"usage": usage(job, choices, cached), "kv_transfer_params": params}


def _common(job: Job, what: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": job.ident, "object": what, "created": CREATED, "model": MODEL, "choices": choices}


def response_object(job: Job, said: str, status: str, used: dict[str, Any] | None) -> dict[str, Any]:
    """The `response` of the Responses API."""
    content: list[dict[str, Any]] = [{"type": "output_text", "text": said, "annotations": [], "logprobs": None}]
    output = [{"id": f"msg-{job.ident}", "type": "message", "role": "assistant", "status": "completed", "content": content}]
    done = status == "completed"
    return {
        "id": job.ident, "object": "response", "created_at": CREATED, "model": MODEL, "status": status,
        "output": output if done else [], "usage": used,
    }  # fmt: skip


def first_chunks(job: Job, choices: list[Choice]) -> list[dict[str, Any]]:
    """What a stream begins with before any token: a role chunk for each choice of a chat."""
    if job.api is not Api.CHAT:
        return []
    empty = {"role": "assistant", "content": ""}
    told = [{"index": c.index, "delta": dict(empty), "logprobs": None, "finish_reason": None} for c in choices]
    return [_common(job, "chat.completion.chunk", [one]) for one in told]


def token_chunk(job: Job, choice: Choice, k: int) -> dict[str, Any]:
    """Token k of a choice; the last has the reason for which it is the last."""
    piece = choice.pieces[k : k + 1]
    said = "".join(piece)
    ends = choice.finish if k + 1 >= len(choice.pieces) else None
    if job.api is Api.CHAT:
        one = {"index": choice.index, "delta": {"content": said}, "logprobs": _logprobs(job, piece, 0), "finish_reason": ends}
        return _common(job, "chat.completion.chunk", [one | {"stop_reason": None}])
    offset = len("".join(choice.pieces[:k]))
    if job.echo:
        offset += len(choice.prompt_text)
        if k == 0:
            said, piece, offset = choice.prompt_text + said, (choice.prompt_text, *piece), 0
    one = {"index": choice.index, "text": said, "logprobs": _logprobs(job, piece, offset), "finish_reason": ends, "stop_reason": None}
    return _common(job, "text_completion", [one])


def last_chunk(job: Job, choices: list[Choice], cached: int) -> dict[str, Any] | None:
    """The usage, where the stream's options ask for it."""
    if not job.usage_in_stream:
        return None
    what = "chat.completion.chunk" if job.api is Api.CHAT else "text_completion"
    return _common(job, what, []) | {"usage": usage(job, choices, cached)}


def response_events(job: Job, choice: Choice, cached: int) -> list[tuple[str, dict[str, Any]]]:
    """A stream of the Responses API: (event, data)."""
    said = "".join(choice.pieces)
    events: list[tuple[str, dict[str, Any]]] = [("response.created", {"response": response_object(job, "", "in_progress", None)})]
    place = {"item_id": f"msg-{job.ident}", "output_index": 0, "content_index": 0}
    events += [("response.output_text.delta", {**place, "delta": piece}) for piece in choice.pieces]
    events.append(("response.output_text.done", {**place, "text": said}))
    events.append(("response.completed", {"response": response_object(job, said, "completed", usage(job, [choice], cached))}))
    return [(name, {"type": name, "sequence_number": k, **data}) for k, (name, data) in enumerate(events)]
