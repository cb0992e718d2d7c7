"""Which server is chosen, and what the breaker does; what the configuration may say."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from expertwire.errors import InvalidArgumentError
from expertwire.proxy import config, metrics
from expertwire.proxy.policy import Fleet, Policy, ServerConfig, Side, Standing


def fleet(count: int = 3, policy: Policy = Policy.LEAST_LOADED, ranks: int = 0) -> Fleet:
    made = Fleet(policy, 3, 5.0)
    for i in range(count):
        made.add(Side.PREFILL, ServerConfig(f"http://p{i}:80", f"p{i}", ranks))
    return made


def names(made: Fleet, count: int, **how: Any) -> list[str]:
    chosen = [made.choose(Side.PREFILL, 0.0, **how) for _ in range(count)]
    return [one[0].name for one in chosen if one is not None]


def test_round_robin() -> None:
    assert Counter(names(fleet(policy=Policy.ROUND_ROBIN), 300)) == {"p0": 100, "p1": 100, "p2": 100}


def test_least_loaded() -> None:
    made = fleet()
    servers = made.servers(Side.PREFILL)
    servers[0].in_flight, servers[1].in_flight = 10, 4
    assert set(names(made, 4)) == {"p2"}
    assert Counter(names(made, 12))["p0"] == 0
    for server in servers:
        server.in_flight = 0
    assert Counter(names(made, 30)) == {"p0": 10, "p1": 10, "p2": 10}


def test_sessions_stay_and_only_those_of_who_leaves_move() -> None:
    made = fleet(4, Policy.SESSION)
    keys = [b"session-%d" % i for i in range(200)]
    before = {key: names(made, 1, key=key)[0] for key in keys}
    assert all(names(made, 3, key=key) == [before[key]] * 3 for key in keys[:20])
    assert min(Counter(before.values()).values()) > 25
    made.remove(Side.PREFILL, "p2")
    after = {key: names(made, 1, key=key)[0] for key in keys}
    assert all(after[key] == before[key] for key in keys if before[key] != "p2")
    for server in made.servers(Side.PREFILL):
        server.in_flight = 0
    assert len(set(names(made, 30))) == 3  # without a key by load


def test_ranks_by_load_and_given_back() -> None:
    made = fleet(1, ranks=3)
    chosen = [made.choose(Side.PREFILL, 0.0) for _ in range(6)]
    assert [one[1] for one in chosen if one] == [0, 1, 2, 0, 1, 2]
    for one in chosen:
        assert one is not None
        made.done(*one)
    (server,) = made.servers(Side.PREFILL)
    assert (server.in_flight, server.rank_in_flight) == (0, [0, 0, 0])


def test_the_breaker_passes_over_and_probes() -> None:
    made = fleet(2)
    bad = made.servers(Side.PREFILL)[0]
    assert [made.failed(bad, 10.0) for _ in range(3)] == [False, False, True]
    assert {made.choose(Side.PREFILL, 14.9)[0].name for _ in range(20)} == {"p1"}  # type: ignore[index]
    assert made.choose(Side.PREFILL, 15.0, avoid=(made.servers(Side.PREFILL)[1],)) == (bad, -1)
    assert bad.standing is Standing.PROBING
    assert {made.choose(Side.PREFILL, 15.1)[0].name for _ in range(20)} == {"p1"}  # type: ignore[index]
    made.answered(bad)
    assert bad.standing is Standing.SERVING
    assert len({made.choose(Side.PREFILL, 15.2, (), b"")[0].name for _ in range(60)}) == 2  # type: ignore[index]


def test_a_probe_that_fails_trips_at_once() -> None:
    made = fleet(2)
    bad, good = made.servers(Side.PREFILL)
    for _ in range(3):
        made.failed(bad, 0.0)
    made.choose(Side.PREFILL, 5.0, avoid=(good,))
    assert made.failed(bad, 6.0)
    assert (bad.standing, bad.open_until) == (Standing.TRIPPED, 11.0)


def test_a_probe_that_nobody_waited_for_is_made_again() -> None:
    made = fleet(2)
    bad, good = made.servers(Side.PREFILL)
    for _ in range(3):
        made.failed(bad, 0.0)
    for now in (5.0, 10.0, 15.0):
        assert made.choose(Side.PREFILL, now, avoid=(good,)) == (bad, -1)  # and its client left
        good.in_flight += 5
    assert made.choose(Side.PREFILL, 20.0)[0] is bad  # type: ignore[index]


def test_the_last_server_is_never_passed_over() -> None:
    made = fleet(1)
    (server,) = made.servers(Side.PREFILL)
    for _ in range(10):
        made.failed(server, 0.0)
    assert made.choose(Side.PREFILL, 0.1) == (server, -1)
    made = fleet(2)
    for server in made.servers(Side.PREFILL):
        for _ in range(3):
            made.failed(server, 0.0)
    assert made.choose(Side.PREFILL, 0.1) is not None


def test_an_answer_mends() -> None:
    made = fleet(2)
    server = made.servers(Side.PREFILL)[0]
    made.failed(server, 0.0)
    made.failed(server, 0.0)
    made.answered(server)
    made.failed(server, 0.0)
    assert server.standing is Standing.SERVING


def test_who_is_removed_gets_nothing_new() -> None:
    made = fleet(2)
    gone = made.remove(Side.PREFILL, "p0")
    assert gone is not None
    assert gone.standing is Standing.DRAINING
    assert set(names(made, 5)) == {"p1"}
    assert made.remove(Side.PREFILL, "p0") is None
    made.answered(gone)
    for _ in range(5):
        made.failed(gone, 0.0)
    assert gone.standing is Standing.DRAINING
    made.remove(Side.PREFILL, "p1")
    assert made.choose(Side.PREFILL, 0.0) is None
    made.add(Side.PREFILL, ServerConfig("http://p9:80"))
    assert names(made, 1) == ["prefill-0"]


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "p0",
            "p0:80",
            "ftp://p0",
            "http://",
            "http://p0:x",
            "http://p0:99999",
            "http://p0?x=1",
            "http://u:hunter2@p0",
            "http://p0#x",
        ),
        *(
            "http://[::1",
            "http://p0:0",
            "http://@p0",
            "http://p 0:1",
            "http://p0/a b",
            "http://p0/\r\nx:y",
            "http://p0/é",
            "http://ü.example:1",
        ),
    ],
)
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="give http://HOST:PORT") as caught:
        Fleet(Policy.ROUND_ROBIN, 3, 5.0).add(Side.PREFILL, ServerConfig(url))
    assert "hunter2" not in str(caught.value)


def test_urls() -> None:
    made = Fleet(Policy.ROUND_ROBIN, 3, 5.0)
    plain = made.add(Side.PREFILL, ServerConfig("http://[::1]/base/"))
    assert (plain.host, plain.port, plain.prefix, plain.host_header, plain.tls) == ("::1", 80, b"/base", b"[::1]", False)
    secure = made.add(Side.PREFILL, ServerConfig("https://p.example"))
    assert (secure.port, secure.tls, secure.origin) == (443, True, b"https://p.example")
    with pytest.raises(InvalidArgumentError, match="'prefill-0' is there already"):
        made.add(Side.PREFILL, ServerConfig("http://x", "prefill-0"))


@pytest.mark.parametrize("name", ["a\r\nset-cookie: x", "a\x00", "a" * 129])
def test_a_name_that_no_header_may_hold(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="characters that can be printed"):
        Fleet(Policy.ROUND_ROBIN, 3, 5.0).add(Side.DECODE, ServerConfig("http://x", name))


def test_a_name_that_we_give_is_none_that_is_there() -> None:
    made = Fleet(Policy.ROUND_ROBIN, 3, 5.0)
    made.add(Side.PREFILL, ServerConfig("http://x", "prefill-1"))
    assert [made.add(Side.PREFILL, ServerConfig("http://x")).name for _ in range(3)] == ["prefill-0", "prefill-2", "prefill-3"]


BASE = '[[prefill]]\nurl = "http://p:1"\n[[decode]]\nurl = "http://d:1"\n'


def load(tmp_path: Path, text: str) -> config.Config:
    path = tmp_path / "proxy.toml"
    path.write_text(text)
    return config.load(path)


def test_a_file_and_flags_over_it(tmp_path: Path) -> None:
    text = 'port = 9\nbatch = "decode"\n[timeouts]\nconnect_s = 2\n[admin]\nport = 7\n' + BASE.replace(
        "url", 'name = "a"\nranks = 4\nurl', 1
    )
    made = load(tmp_path, text)
    assert (made.port, made.batch, made.timeouts.connect_s, made.admin.port) == (9, "decode", 2.0, 7)
    assert made.prefill == (ServerConfig("http://p:1", "a", 4),)
    assert made.decode == (ServerConfig("http://d:1"),)
    over = config.override(
        made, port=10, admin__port=None, admin__host="::1", decode=config.servers_of(["x=http://e:1", "http://f:1/?"[:-2]])
    )
    assert (over.port, over.admin.host, over.admin.port) == (10, "::1", 7)
    assert over.decode == (ServerConfig("http://e:1", "x"), ServerConfig("http://f:1"))
    assert config.servers_of(["http://h/a=b"]) == (ServerConfig("http://h/a=b"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1\n" + BASE, "there is no key prot; did you mean port?"),
        (BASE + "[timeouts]\nconect_s = 1\n", "there is no key timeouts.conect_s; did you mean timeouts.connect_s?"),
        (BASE + "[kv]\nzzz = 1\n", "there is no key kv.zzz; there is lease_s, margin_s, release"),
        ('port = "x"\n' + BASE, "port is 'x'; give a whole number"),
        ("port = 70000\n" + BASE, "port is 70000; give 0 to 65535"),
        ("workers = true\n" + BASE, "workers is True; give a whole number"),
        ("workers = 0\n" + BASE, "workers is 0; give 1 to 1024"),
        (BASE + "[timeouts]\nidle_s = -1\n", "timeouts.idle_s is -1.0; give 0.001 or more"),
        (BASE + f"[limits]\nbacklog = {2**40}\n", f"limits.backlog is {2**40}; give 1 to {2**31 - 1}"),
        (BASE + "[timeouts]\nidle_s = nan\n", "timeouts.idle_s is nan; give 0.001 or more"),
        (BASE + "[limits]\nbody_bytes = 0\n", "limits.body_bytes is 0; give 1 or more"),
        (BASE + "[kv]\nlease_s = 4\n", "kv.margin_s is 5; it must be below kv.lease_s, which is 4"),
        ('policy = "random"\n' + BASE, "policy is 'random'; give one of round_robin, least_loaded, session"),
        (BASE + '[log]\nlevel = "loud"\n', "log.level is 'loud'; give one of debug"),
        ("timeouts = 3\n" + BASE, "timeouts is 3; give a table"),
        ('prefill = "http://p"\n', "prefill is 'http://p'; give tables"),
        ("[[prefill]]\nname = 'a'\n", "prefill[0]: url is missing"),
        ("[[prefill]]\nurl = 'p'\n[[decode]]\nurl='http://d'\n", "prefill[0].url is 'p'; give http"),
        ("[[decode]]\nurl='http://d'\n", "prefill has no server"),
        ("[[prefill]]\nurl='http://d'\n", "decode has no server"),
        (BASE + "[tls]\nca_file = '/nowhere/x'\n", "tls.ca_file is '/nowhere/x', which is no file"),
        ("port = \n", "port: Invalid value"),
        (BASE + "[timeouts]\n# a comment\nconnect_s = 1 s\n", "timeouts.connect_s: Expected newline"),
        (BASE + "[limits]\nbody_bytes = 1\nbody_bytes = 2\n", "limits.body_bytes: Cannot overwrite a value"),
        (BASE + "[limits\n", "Expected ']'"),
        (BASE + "[limits]\nheld_bytes = 1000\n", "limits.body_bytes is 67108864; it must not be above limits.held_bytes, which is 1000"),
        ("port = 9000\n" + BASE + '[admin]\nport = 9000\nhost = "0.0.0.0"\n', "admin.port is 9000, which is port too"),
        (BASE + "[[decode]]\nurl = 'http://e'\nranks = -1\n", "ranks of decode-1 is -1"),
    ],
)
def test_errors_name_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)
    assert "proxy.toml" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="No such file"):
        config.load(tmp_path / "none.toml")


def test_metrics_of_workers_are_added_up() -> None:
    one, two = metrics.Metrics(), metrics.Metrics()
    for each in (one, two, two):
        each.count("replies_total", "200")
        each.request.observe(0.02)
    gauges: list[metrics.Snapshot] = [{"in_flight": {(): 1}, "server_up": {("prefill", 'a"b'): up}} for up in (0, 1)]
    text = metrics.text(metrics.merge([one.snapshot(gauges[0]), two.snapshot(gauges[1])]))
    assert 'expertwire_proxy_replies_total{status="200"} 3\n' in text
    assert "expertwire_proxy_in_flight 2\n" in text
    assert 'expertwire_proxy_server_up{side="prefill",server="a\\"b"} 0\n' in text
    assert 'expertwire_proxy_request_seconds_bucket{le="0.03125"} 3\n' in text
    assert 'expertwire_proxy_request_seconds_bucket{le="0.015625"} 0\n' in text
    assert "expertwire_proxy_reprefills_total 0\n" in text
    assert one.value("replies_total") == 1


def documented() -> str:
    return (Path(__file__).resolve().parents[2] / "docs" / "proxy.md").read_text()


def test_the_settings_of_the_page_are_the_defaults() -> None:
    block = documented().split("```toml\n")[1].split("```")[0]
    table = tomllib.loads(block)
    made = config.from_table(table)
    assert made == config.override(config.Config(), prefill=made.prefill, decode=made.decode)
    for item in dataclasses.fields(config.Config):
        assert item.name in table, f"docs/proxy.md has no {item.name}"
        inner = getattr(made, item.name)
        if dataclasses.is_dataclass(inner):
            assert [field.name for field in dataclasses.fields(inner)] == list(table[item.name])


def test_every_metric_is_on_the_page() -> None:
    names = re.findall(r"^# TYPE expertwire_proxy_(\S+)", metrics.text({}), re.MULTILINE)
    assert len(names) > 15
    page = documented().split("## Metrics")[1]
    assert [name for name in names if f"`{name}" not in page] == []
