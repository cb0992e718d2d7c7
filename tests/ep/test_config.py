"""Config, its tables and the size hints."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertwire.ep import Buffer, Config, EventHandle, EventOverlap
from expertwire.ep.layout import expert_bounds, number_nodes
from expertwire.errors import InvalidArgumentError, InvalidTypeError

FIELDS = (
    "num_max_nvl_chunked_send_tokens",
    "num_max_nvl_chunked_recv_tokens",
    "num_max_rdma_chunked_send_tokens",
    "num_max_rdma_chunked_recv_tokens",
)


def values(config: Config) -> tuple[int, ...]:
    return tuple(getattr(config, name) for name in FIELDS)


def test_defaults_and_positions() -> None:
    assert values(Config()) == (6, 256, 6, 256)
    assert Config().num_sms == 20
    config = Config(24, 8, 300, 7, 200)
    assert (config.num_sms, *values(config)) == (24, 8, 300, 7, 200)


@pytest.mark.parametrize(
    ("ranks", "dispatch", "combine"),
    [
        (2, (24, 256, 6, 128), (10, 256, 6, 128)),
        (4, (6, 256, 6, 128), (9, 256, 6, 128)),
        (8, (6, 256, 6, 128), (4, 256, 8, 128)),
        (16, (36, 288, 20, 128), (4, 288, 12, 128)),
        (24, (32, 288, 8, 128), (1, 288, 8, 128)),
        (64, (32, 288, 8, 128), (1, 288, 8, 128)),
        (96, (20, 480, 12, 128), (1, 480, 8, 128)),
        (128, (20, 560, 12, 128), (1, 560, 8, 128)),
        (144, (32, 720, 12, 128), (2, 720, 8, 128)),
        (160, (28, 720, 12, 128), (2, 720, 8, 128)),
        (1, (24, 256, 6, 128), (10, 256, 6, 128)),
        (7, (6, 256, 6, 128), (4, 256, 8, 128)),
        (1000, (28, 720, 12, 128), (2, 720, 8, 128)),
    ],
)
def test_tables_and_the_nearest_entry(ranks: int, dispatch: tuple[int, ...], combine: tuple[int, ...]) -> None:
    assert values(Buffer.get_dispatch_config(ranks)) == dispatch
    assert values(Buffer.get_combine_config(ranks)) == combine


def test_num_sms_is_even_and_reaches_the_configs() -> None:
    before = Buffer.num_sms
    try:
        Buffer.set_num_sms(14)
        assert Buffer.get_dispatch_config(8).num_sms == 14
        with pytest.raises(InvalidArgumentError, match="new_num_sms is 15; it must be even"):
            Buffer.set_num_sms(15)
        with pytest.raises(InvalidArgumentError, match="new_num_sms is -2"):
            Buffer.set_num_sms(-2)
    finally:
        Buffer.set_num_sms(before)


def test_low_latency_hint_has_the_published_numbers() -> None:
    assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 288) == 2_146_961_792
    assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) == 1_908_410_496
    hint = Buffer.get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank=1024, hidden=7168, num_ranks=16, num_experts=256)
    assert hint == 15_267_268_736


@given(st.integers(1, 1 << 20), st.integers(1, 512))
def test_hints_hold_what_the_chunks_say(hidden_bytes: int, ranks: int) -> None:
    config = Config()
    rows = config.num_sms // 2 * config.num_max_nvl_chunked_recv_tokens * ranks
    assert config.get_nvl_buffer_size_hint(hidden_bytes, ranks) >= rows * hidden_bytes
    assert (config.get_rdma_buffer_size_hint(hidden_bytes, ranks) == 0) == (ranks == 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((20, 0), "num_max_nvl_chunked_send_tokens is 0; it must be at least 1"),
        ((20, 6, 6), "num_max_nvl_chunked_send_tokens is 6; it must be less than num_max_nvl_chunked_recv_tokens, which is 6"),
        ((-1,), "num_sms is -1"),
    ],
)
def test_config_refuses(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Config(*arguments)


def test_config_refuses_other_types() -> None:
    with pytest.raises(InvalidTypeError, match=r"num_sms must be an int, got 2\.5"):
        Config(2.5)  # type: ignore[arg-type]


def test_events_are_complete() -> None:
    event = Buffer.capture()
    assert isinstance(event.event, EventHandle)
    with event as entered:
        assert entered is event
    event.current_stream_wait()
    assert EventOverlap().event is None
    EventOverlap().current_stream_wait()


@given(st.integers(1, 1000), st.integers(1, 64))
def test_experts_are_placed_evenly_and_in_order(experts: int, ranks: int) -> None:
    bounds = expert_bounds(experts, ranks)
    shares = [end - start for start, end in itertools.pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(shares)) == (0, experts, ranks)
    assert shares == sorted(shares, reverse=True)
    assert max(shares) - min(shares) <= 1


def test_node_names_become_numbers() -> None:
    assert number_nodes(["b", "a", "b"]) == (0, 1, 0)
    assert number_nodes([1, 1, 0]) == (1, 1, 0)
    assert number_nodes([7, 3, 7]) == (0, 1, 0)
