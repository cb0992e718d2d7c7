"""What the proxy itself answers when it cannot serve: OpenAI's shape of an error, without an upstream's address, and never a traceback."""

from __future__ import annotations

from dataclasses import dataclass

import orjson


@dataclass(frozen=True, slots=True)
class Fault:
    """One failure as a reply. `retry_after_s`: seconds for the header Retry-After, None for none."""

    status: int
    type: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None

    def body(self) -> bytes:
        """The JSON of a reply."""
        return orjson.dumps({"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.status}})

    def event(self) -> bytes:
        """The same as one event of a stream whose status has left."""
        return b"data: " + self.body() + b"\n\n"

    def header_lines(self) -> bytes:
        """Rendered header lines of a reply."""
        retry = b"" if self.retry_after_s is None else b"retry-after: %d\r\n" % self.retry_after_s
        return b"content-type: application/json\r\n" + retry


def bad_request(message: str, param: str | None = None) -> Fault:
    """400: the client's request cannot be meant."""
    return Fault(400, "invalid_request_error", message, param)


def request_timeout(what: str, seconds: float) -> Fault:
    """408: the client has not sent all of its request."""
    return Fault(408, "request_timeout", f"{what} did not arrive within {seconds:g} s")


def too_large(what: str, limit: int) -> Fault:
    """413: the client's body is over the limit."""
    return Fault(413, "invalid_request_error", f"{what} is larger than this server's limit of {limit} bytes")


def head_too_large(limit: int) -> Fault:
    """431: the client's headers are over the limit."""
    return Fault(431, "invalid_request_error", f"the headers are larger than this server's limit of {limit} bytes")


def busy(limit: int, retry_after_s: int) -> Fault:
    """429: as many requests as allowed are in flight."""
    message = f"{limit} requests are in flight, which is this server's limit; try again in {retry_after_s} s"
    return Fault(429, "rate_limit_error", message, None, retry_after_s)


def internal() -> Fault:
    """500: a fault of the proxy."""
    return Fault(500, "internal_error", "the proxy failed to handle this request; its log says more under this request id")


def unreached(side: str) -> Fault:
    """502: no connection to any server that was tried."""
    return Fault(502, "upstream_unreachable", f"no {side} server could be reached", None, 1)


def lost(side: str) -> Fault:
    """502: the connection ended before the answer did."""
    return Fault(502, "upstream_closed", f"the {side} server closed its connection before its answer was complete")


def protocol(side: str) -> Fault:
    """502: what came is not an answer."""
    return Fault(502, "upstream_protocol", f"the {side} server's answer is not valid HTTP")


def answer_too_large(side: str, limit: int) -> Fault:
    """502: an upstream's answer is over the limit."""
    return Fault(502, "upstream_too_large", f"the {side} server's answer is larger than this server's limit of {limit} bytes")


def not_json(side: str) -> Fault:
    """502: an answer of 2xx that should be JSON and is not."""
    return Fault(502, "upstream_invalid", f"the {side} server's answer is not the JSON object that was asked for")


def not_a_stream() -> Fault:
    """502: D answered a request for a stream with something else."""
    return Fault(502, "upstream_invalid", "the decode server's answer is not the stream of events that was asked for")


def incomplete_prefill(field: str) -> Fault:
    """502: P's answer lacks what D needs; D was not called."""
    message = f"the prefill server's answer has no usable {field}; the decode server was not called"
    return Fault(502, "prefill_incomplete", message, field)


def no_content() -> Fault:
    """502: D ended without an error, and without any content."""
    return Fault(502, "decode_empty", "the decode server ended its answer without any content")


def cut_short() -> Fault:
    """502: D's stream ended without its mark."""
    return Fault(502, "decode_cut_short", "the decode server's stream ended before it was complete")


def upstream_error(status: int, message: str) -> Fault:
    """An error that an upstream told within a stream."""
    return Fault(status, "upstream_error", message)


def no_server(side: str, retry_after_s: int) -> Fault:
    """503: there is no server of that side."""
    return Fault(503, "service_unavailable", f"there is no {side} server at the moment", None, retry_after_s)


def no_descriptors(limit: int, retry_after_s: int) -> Fault:
    """503: this process can open no more connections, or take none. `limit`: its open files, 0 for none."""
    files = f"its limit is {limit} open files (RLIMIT_NOFILE)" if limit else "the system has no descriptors or local ports left"
    message = f"this server can open no further connection: {files}; try again in {retry_after_s} s"
    return Fault(503, "service_unavailable", message, None, retry_after_s)


def no_room(limit: int, retry_after_s: int) -> Fault:
    """503: the bodies that are held leave no room for another."""
    message = (
        f"this server holds bodies of {limit} bytes at most, all together, and has no room for this one; try again in {retry_after_s} s"
    )
    return Fault(503, "service_unavailable", message, None, retry_after_s)


def expired(lease_s: float) -> Fault:
    """503: the prefilled blocks' lease ran out before D could be called, as often as is tried."""
    message = f"no decode server took the request before the prefilled blocks' lease of {lease_s:g} s ran out"
    return Fault(503, "prefill_expired", message, None, 1)


def stopping() -> Fault:
    """503: this server is being shut down."""
    return Fault(503, "service_unavailable", "this server is shutting down", None, 1)


def timed_out(side: str, seconds: float) -> Fault:
    """504: nothing came for too long."""
    return Fault(504, "upstream_timeout", f"the {side} server sent nothing for {seconds:g} s")
