"""What goes wrong with servers, and what the client is told of it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from expertwire.proxy.seam import Failure, Kind, Mode
from proxy.world import DONE, JSON, ROLE, SSE, World, config_of, delta_event, parameters, reply_of, text_event

BODY = {"model": "m", "prompt": "x"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
CHAT_PATH = b"/v1/chat/completions"


@pytest.mark.parametrize("status", [502, 503, 504])
def test_an_overloaded_p_is_tried_elsewhere_and_its_answer_kept(status: int) -> None:
    world = World(config_of(prefill=2))
    client = world.ask(BODY)
    first = client.of(Kind.PREFILL)[0]
    client.answer(first, status, b"first", [(b"retry-after", b"3")])
    second = client.of(Kind.PREFILL)[0]
    assert second.server is not first.server
    client.answer(second, status, b"second", [(b"retry-after", b"4")])
    assert (client.status, client.body, client.header(b"retry-after")) == (status, b"second", b"4")
    world.assert_idle()


def test_one_p_alone_is_not_asked_twice() -> None:
    world = World()
    client = world.ask(BODY)
    client.answer(client.of(Kind.PREFILL)[0], 503, b"busy")
    assert (client.status, client.body, len(client.legs)) == (503, b"busy", 1)


def test_what_one_p_said_outlives_that_another_is_not_reached() -> None:
    world = World(config_of(prefill=2))
    client = world.ask(BODY)
    client.answer(client.of(Kind.PREFILL)[0], 503, b"busy", [(b"retry-after", b"9")])
    client.fail(client.of(Kind.PREFILL)[0], Failure.CONNECT)
    assert (client.status, client.body, client.header(b"retry-after")) == (503, b"busy", b"9")


def test_no_p_reached() -> None:
    world = World(config_of(prefill=2))
    client = world.ask(BODY)
    for _ in range(2):
        client.fail(client.of(Kind.PREFILL)[0], Failure.CONNECT)
    assert client.status == 502
    assert client.error["type"] == "upstream_unreachable"
    assert b"10.0." not in client.body
    assert not client.calls(Kind.DECODE)
    world.assert_idle()


def test_no_p_at_all_is_503_and_never_silently_d_alone() -> None:
    world = World()
    world.core.fleet.remove("prefill", "p0")
    client = world.ask(BODY)
    assert (client.status, client.header(b"retry-after")) == (503, b"1")
    assert not client.legs


@pytest.mark.parametrize("how", ["removed", "unreached"])
def test_d_alone_where_it_is_allowed(how: str) -> None:
    world = World(config_of(allow_decode_alone=True))
    if how == "removed":
        world.core.fleet.remove("prefill", "p0")
    client = world.ask(BODY)
    if how == "unreached":
        client.fail(client.of(Kind.PREFILL)[0], Failure.CONNECT)
    assert client.calls(Kind.DECODE)[0].body == BODY
    client.answer(client.of(Kind.DECODE)[0], 200, reply_of())
    assert client.status == 200
    assert world.core.metrics.value("decode_alone_total", "no_prefill") == 1
    world.assert_idle()


@pytest.mark.parametrize("field", [*parameters(), "all"])
def test_p_without_a_needed_field(field: str) -> None:
    values: dict[str, Any] | None = parameters()
    if field == "all":
        values = None
    else:
        del values[field]
    client = World().ask(BODY)
    client.answer(client.of(Kind.PREFILL)[0], 200, {"choices": [{}], "kv_transfer_params": values})
    if field in ("tp_size", "something_new", "do_remote_decode"):
        assert len(client.calls(Kind.DECODE)) == 1
        return
    named = "kv_transfer_params" if field == "all" else f"kv_transfer_params.{field}"
    assert (client.status, client.error["param"]) == (502, named)
    assert named in client.error["message"]
    assert not client.calls(Kind.DECODE)


@pytest.mark.parametrize(("failure", "what"), [(Failure.DESCRIPTORS, "descriptors"), (Failure.HELD, "bodies")])
@pytest.mark.parametrize("side", [Kind.PREFILL, Kind.DECODE, Kind.PLAIN])
def test_what_we_run_out_of_is_no_servers_failure(failure: Failure, what: str, side: Kind) -> None:
    """Not told as one, not tried elsewhere, not computed by D alone, not counted by the breaker; blocks that are held are freed."""
    world = World(config_of(prefill=2, decode=2, allow_decode_alone=True), instant=False)
    world.core.descriptors = 80
    for _ in range(5):
        client = world.ask(BODY, b"/v1/completions" if side is not Kind.PLAIN else b"/tokenize")
        if side is Kind.DECODE:
            client.connect(client.of(Kind.PREFILL)[0])
            client.prefill()
        calls = len(client.legs)
        if failure is Failure.HELD:
            client.connect(client.of(side)[0])
        client.fail(client.of(side)[0], failure)
        assert (client.status, client.header(b"retry-after"), client.error["type"]) == (503, b"1", "service_unavailable")
        assert ("80 open files" if what == "descriptors" else "1073741824 bytes") in client.error["message"]
        released = side is Kind.DECODE and failure is Failure.DESCRIPTORS
        assert len(client.legs) == calls + released
        if released:
            client.fail(client.of(Kind.RELEASE)[0], failure)
    world.assert_idle()
    assert world.core.metrics.value("breaker_trips_total") == world.core.metrics.value("retries_total") == 0
    assert world.core.metrics.value("exhausted_total", what) >= 5
    assert all(server.failures == 0 for where in ("prefill", "decode") for server in world.core.fleet.servers(where))


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"choices"'])
def test_p_that_says_200_and_no_json(body: bytes) -> None:
    client = World().ask(BODY)
    client.answer(client.of(Kind.PREFILL)[0], 200, body)
    assert client.status == 502
    assert not client.calls(Kind.DECODE)


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (Failure.LOST, 502, "upstream_closed"),
        (Failure.PROTOCOL, 502, "upstream_protocol"),
        (Failure.TOO_LARGE, 502, "upstream_too_large"),
        (Failure.TIMED_OUT, 504, "upstream_timeout"),
    ],
)
@pytest.mark.parametrize("side", [Kind.PREFILL, Kind.DECODE])
def test_a_leg_that_fails_after_it_was_sent(failure: Failure, status: int, kind: str, side: Kind) -> None:
    world = World(config_of(prefill=2, decode=2))
    client = world.ask(BODY)
    if side is Kind.DECODE:
        client.prefill()
    client.fail(client.of(side)[0], failure)
    assert (client.status, client.error["type"]) == (status, kind)
    assert not client.open, "what was sent is not sent again"
    world.assert_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
@pytest.mark.parametrize("body", [b'{"error":{"message":"no"}}', b"<html>no</html>", b"plain", b""])
def test_a_refusal_of_d_is_verbatim(status: int, body: bytes, stream: bool) -> None:
    world = World(config_of(decode=2))
    client = world.ask(BODY | {"stream": stream})
    client.prefill()
    client.answer(client.of(Kind.DECODE)[0], status, body, [(b"content-type", b"text/odd"), (b"retry-after", b"8")])
    assert (client.how, client.status, client.body) == ("reply", status, body)
    assert client.header(b"content-type") == b"text/odd"
    assert client.header(b"retry-after") == b"8"
    assert not client.of(Kind.RELEASE), "D has the parameters: it frees P's blocks itself"
    world.assert_idle()


def test_an_error_before_content_has_a_status_of_its_own() -> None:
    """P was killed before the pull: D says 200, a role, then an error and [DONE]."""
    world = World()
    client = world.ask(CHAT, CHAT_PATH)
    client.prefill()
    (leg,) = client.of(Kind.DECODE)
    client.head(leg)
    client.data(leg, ROLE)
    client.data(leg, b'data: {"error": {"message": "KV load failed", "type": "InternalServerError", "code": 500}}\n\n' + DONE)
    assert (client.how, client.status) == ("reply", 500)
    assert client.error["message"] == "KV load failed"
    assert client.header(b"content-type") == b"application/json"
    assert client.cancelled == [leg]
    world.assert_idle()


def test_an_error_after_content_is_the_last_event() -> None:
    world = World()
    client = world.ask(CHAT, CHAT_PATH)
    client.prefill()
    (leg,) = client.of(Kind.DECODE)
    client.head(leg)
    client.data(leg, ROLE + delta_event({"content": "a"}))
    error = b'data: {"error":{"message":"broke","code":500}}\n\n'
    client.data(leg, delta_event({"content": "b"}) + error + DONE)
    assert client.how == "aborted"
    assert client.body == ROLE + delta_event({"content": "a"}) + delta_event({"content": "b"}) + error
    assert world.core.metrics.value("stream_errors_total") == 1
    world.assert_idle()


@pytest.mark.parametrize("tail", [b"", b"data: {", delta_event({"content": "b"})])
def test_an_end_without_its_mark_is_no_end(tail: bytes) -> None:
    client = World().ask(CHAT, CHAT_PATH)
    client.prefill()
    (leg,) = client.of(Kind.DECODE)
    client.head(leg)
    client.data(leg, delta_event({"content": "a"}))
    if tail:
        client.data(leg, tail)
    client.end(leg)
    assert client.how == "aborted"
    assert client.events[-1]["error"]["type"] == "decode_cut_short"


@pytest.mark.parametrize("pieces", [[], [ROLE], [ROLE, DONE], [DONE], [b": ping\n\n"]])
def test_a_stream_without_content_is_never_200(pieces: list[bytes]) -> None:
    world = World()
    client = world.ask(CHAT, CHAT_PATH)
    client.prefill()
    (leg,) = client.of(Kind.DECODE)
    client.head(leg)
    for piece in pieces:
        client.data(leg, piece)
    if leg in client.open:
        client.end(leg)
    assert (client.how, client.status) == ("reply", 502)
    assert client.error["type"] == "decode_empty"
    world.assert_idle()


@pytest.mark.parametrize("body", [b"", b"ok", b"[]", b"{}", b'{"choices":[]}', orjson.dumps(reply_of())[:-5]])
def test_a_whole_answer_without_content_is_never_200(body: bytes) -> None:
    client = World().ask(BODY)
    client.prefill()
    client.answer(client.of(Kind.DECODE)[0], 200, body)
    assert client.status == 502


def test_a_stream_that_was_asked_for_and_is_none() -> None:
    client = World().ask(CHAT, CHAT_PATH)
    client.prefill()
    client.answer(client.of(Kind.DECODE)[0], 200, reply_of(), JSON)
    assert (client.status, client.error["type"]) == (502, "upstream_invalid")


def test_what_was_lost_behind_the_mark_of_the_end_is_no_loss() -> None:
    client = World().ask(CHAT, CHAT_PATH)
    client.prefill()
    (leg,) = client.of(Kind.DECODE)
    client.head(leg)
    client.data(leg, delta_event({"content": "a"}))
    client.data(leg, DONE)
    client.fail(leg, Failure.LOST)
    assert client.how == "finished"


def test_a_mark_without_its_empty_line() -> None:
    client = World().ask(CHAT, CHAT_PATH)
    client.prefill()
    (leg,) = client.of(Kind.DECODE)
    client.head(leg)
    client.data(leg, delta_event({"content": "a"}))
    client.data(leg, b"data: [DONE]\n")
    client.end(leg)
    assert client.how == "finished"
    assert client.body.endswith(DONE)


def test_an_expired_lease_is_prefilled_again() -> None:
    world = World(instant=False)
    client = world.ask(BODY)
    client.connect(client.of(Kind.PREFILL)[0])
    stale = client.prefill()
    world.now += 25.0
    (waiting,) = client.of(Kind.DECODE)
    client.connect(waiting)
    assert client.cancelled == [waiting], "nothing was written, so it may go back to its pool"
    client.connect(client.of(Kind.PREFILL)[0])
    fresh = client.prefill()
    world.now += 24.9
    client.connect(client.of(Kind.DECODE)[0])
    assert client.calls(Kind.DECODE)[0].body["kv_transfer_params"] == fresh
    client.connect(client.of(Kind.RELEASE)[0])
    assert client.calls(Kind.RELEASE)[0].body["kv_transfer_params"] == stale
    assert world.core.metrics.value("expiries_total") == 1
    assert world.core.metrics.value("reprefills_total") == 1
    assert client.calls(Kind.DECODE)[0].headers[b"x-request-id"].endswith(b"-r1")


def test_a_lease_that_always_expires_is_503() -> None:
    world = World(config_of(retries__reprefills=1, kv__release=False), instant=False)
    client = world.ask(BODY)
    for _ in range(2):
        client.connect(client.of(Kind.PREFILL)[0])
        client.prefill()
        world.now += 26
        client.connect(client.of(Kind.DECODE)[0])
    assert (client.status, client.error["type"]) == (503, "prefill_expired")
    world.assert_idle()


def test_a_d_that_is_not_reached_means_release_and_prefill_again() -> None:
    world = World(config_of(decode=2), instant=False)
    client = world.ask(BODY)
    client.connect(client.of(Kind.PREFILL)[0])
    first = client.prefill()
    unreached = client.of(Kind.DECODE)[0]
    world.instant = True
    client.fail(unreached, Failure.CONNECT)
    second = client.prefill()
    (leg,) = client.of(Kind.DECODE)
    assert leg.server is not unreached.server
    assert client.calls(Kind.DECODE)[-1].body["kv_transfer_params"] == second
    (release,) = client.of(Kind.RELEASE)
    assert release.server is not unreached.server
    assert client.calls(Kind.RELEASE)[0].body["kv_transfer_params"] == first
    client.answer(leg, 200, reply_of())
    client.answer(release, 404, {"error": {}})
    assert client.status == 200
    assert world.core.metrics.value("releases_total", "released") == 1
    world.assert_idle()


def test_no_d_reached_means_502_and_what_can_be_released_is() -> None:
    world = World(config_of(decode=1), instant=False)
    client = world.ask(BODY)
    client.connect(client.of(Kind.PREFILL)[0])
    client.prefill()
    client.fail(client.of(Kind.DECODE)[0], Failure.CONNECT)
    assert not client.of(Kind.RELEASE)  # there is nobody to send it to
    assert (client.status, client.error["type"]) == (502, "upstream_unreachable")
    assert len(client.calls(Kind.PREFILL)) == 1, "P does not compute again for nobody"
    assert world.core.metrics.value("releases_total", "failed") == 1
    world.assert_idle()


@pytest.mark.parametrize("side", [Kind.PREFILL, Kind.DECODE])
def test_a_kept_connection_that_had_been_closed(side: Kind) -> None:
    """Of D the parameters may have been used, so P is asked again; the same server may be asked."""
    world = World()
    client = world.ask(BODY)
    if side is Kind.DECODE:
        client.prefill()
    client.fail(client.of(side)[0], Failure.STALE)
    assert len(client.of(Kind.PREFILL)) == 1
    client.prefill()
    client.answer(client.of(Kind.DECODE)[0], 200, reply_of())
    assert client.status == 200
    assert not client.calls(Kind.RELEASE)
    world.assert_idle()


@pytest.mark.parametrize("when", ["prefilling", "connecting", "handoff", "decoding", "streaming"])
def test_a_client_that_leaves_closes_the_leg_that_is_open(when: str) -> None:
    world = World(instant=False)
    client = world.ask(CHAT, CHAT_PATH)
    if when != "connecting":
        client.connect(client.of(Kind.PREFILL)[0])
    if when in ("handoff", "decoding", "streaming"):
        client.prefill()
    if when in ("decoding", "streaming"):
        client.connect(client.of(Kind.DECODE)[0])
    if when == "streaming":
        client.head(client.of(Kind.DECODE)[0])
        client.data(client.of(Kind.DECODE)[0], delta_event({"content": "a"}))
    (leg,) = client.open
    client.leave()
    assert (client.abandoned if when == "prefilling" else client.cancelled) == [leg]
    if when == "prefilling":
        client.fail(leg, Failure.LOST)  # P closes when it has heard of it
    assert len(client.calls(Kind.DECODE)) == (when in ("decoding", "streaming"))
    if when == "handoff":  # P's blocks are freed, for D will not come for them
        (release,) = client.open
        client.connect(release)
        client.answer(release, 404, b"")
    assert not client.open
    assert world.core.metrics.value("releases_total", "released") == (when == "handoff")
    world.assert_idle()


@pytest.mark.parametrize("answer", [200, "unfit", 500])
def test_an_answer_of_p_that_was_on_its_way_when_the_client_left(answer: Any) -> None:
    """Nobody will come for its blocks, so they are freed."""
    world = World()
    client = world.ask(BODY)
    (leg,) = client.of(Kind.PREFILL)
    client.leave()
    assert client.open == [leg]
    if answer == 200:
        values = client.prefill(leg)
        assert client.calls(Kind.RELEASE)[0].body["kv_transfer_params"] == values
        client.answer(client.of(Kind.RELEASE)[0], 404, b"")
    else:
        client.answer(leg, 200 if answer == "unfit" else 500, {"kv_transfer_params": None})
    assert not client.open
    assert world.core.metrics.value("legs_total", "prefill", "p0", "cancelled") == 1
    world.assert_idle()


@pytest.mark.parametrize("why", ["tls", "setting"])
def test_where_p_cannot_be_told_by_half_the_connection_goes_whole(why: str) -> None:
    world = World(config_of(kv__release=why != "setting"))
    world.half_close = why != "tls"
    client = world.ask(BODY)
    (leg,) = client.of(Kind.PREFILL)
    client.leave()
    assert client.cancelled == [leg]
    world.assert_idle()


def test_a_release_that_fails_is_counted_and_forgotten() -> None:
    world = World(instant=False)
    client = world.ask(BODY)
    client.connect(client.of(Kind.PREFILL)[0])
    client.prefill()
    client.leave()
    (release,) = client.of(Kind.RELEASE)
    assert release.first_byte_s == world.core.config.timeouts.release_s
    client.fail(release, Failure.TIMED_OUT)
    assert world.core.metrics.value("releases_total", "failed") == 1
    world.assert_idle()


def test_an_error_that_quotes_the_parameters_does_not_tell_them() -> None:
    client = World().ask(BODY)
    client.prefill()
    client.answer(client.of(Kind.DECODE)[0], 400, b"invalid: {'kv_transfer_params': {'remote_host': '10.9.9.9'}}", [])
    assert client.status == 400
    assert b"10.9.9.9" not in client.body


def test_an_event_over_its_limit() -> None:
    world = World(config_of(limits__event_bytes=2000))
    client = world.ask(CHAT, CHAT_PATH)
    client.prefill()
    (leg,) = client.of(Kind.DECODE)
    client.head(leg)
    client.data(leg, delta_event({"content": "a"}))
    client.data(leg, b"data: " + b"x" * 2000)
    assert client.how == "aborted"
    assert client.cancelled == [leg]
    world.assert_idle()


def test_what_comes_before_content_is_bounded() -> None:
    world = World(config_of(limits__reply_bytes=2000))
    client = world.ask(CHAT, CHAT_PATH)
    client.prefill()
    (leg,) = client.of(Kind.DECODE)
    client.head(leg)
    while not client.how:
        client.data(leg, ROLE)
    assert (client.how, client.status) == ("reply", 502)
    world.assert_idle()


def test_in_flight_limit() -> None:
    world = World(config_of(in_flight_limit=2, retry_after_s=7))
    waiting = [world.ask(BODY) for _ in range(2)]
    client = world.ask(BODY)
    assert (client.status, client.header(b"retry-after"), client.error["type"]) == (429, b"7", "rate_limit_error")
    assert not client.legs
    for other in waiting:
        other.leave()
    assert world.ask(BODY).legs
    assert world.core.metrics.value("rejected_total") == 1


def test_while_stopping() -> None:
    world = World()
    world.core.stopping = True
    client = world.ask(BODY)
    assert client.status == 503
    world.assert_idle()


def test_a_json_stream_is_only_taken_for_one_by_its_type() -> None:
    client = World().ask(CHAT, CHAT_PATH)
    client.prefill()
    assert client.head(client.of(Kind.DECODE)[0], 200, JSON) is Mode.WHOLE
    assert client.head(client.of(Kind.DECODE)[0], 400, SSE) is Mode.WHOLE
    assert client.head(client.of(Kind.DECODE)[0], 200, [(b"content-type", b"Text/Event-Stream;x=y")]) is Mode.STREAM


def test_completions_commit_at_their_first_text() -> None:
    client = World().ask(BODY | {"stream": True})
    client.prefill()
    (leg,) = client.of(Kind.DECODE)
    client.head(leg)
    assert client.how == ""
    client.data(leg, text_event("")[:9])
    assert client.how == ""
    client.data(leg, text_event("")[9:])
    assert client.how == "begun"
    assert client.body == text_event("")
