"""What is chosen from a machine: libraries, providers, interfaces, nodes. Machines are made up of directories and lists."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertwire.errors import InvalidArgumentError, UnavailableError
from expertwire.fabric import discover
from expertwire.fabric.config import Settings
from expertwire.fabric.discover import Device, Interface, nodes_from_pairs


def put(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_libfabric_home_is_taken_at_its_word(tmp_path: Path) -> None:
    library = put(tmp_path / "lib64" / discover.LIBRARY)
    assert discover.library_candidates(Settings(libfabric_home=str(tmp_path))) == [str(library)]
    with pytest.raises(InvalidArgumentError, match=r"LIBFABRIC_HOME='/nowhere' holds no lib/libfabric\.so\.1"):
        discover.library_candidates(Settings(libfabric_home="/nowhere"))


def test_a_vendors_library_comes_before_newer_ones(tmp_path: Path) -> None:
    assert discover.library_candidates(Settings(), root=tmp_path)[0] == discover.LIBRARY
    cray = put(tmp_path / "opt/cray/libfabric/1.22.0/lib64" / discover.LIBRARY)
    efa = put(tmp_path / "opt/amazon/efa/lib" / discover.LIBRARY)
    assert discover.library_candidates(Settings(), root=tmp_path) == [str(cray), str(efa)]


def test_wheels_are_found_where_python_has_them() -> None:
    for path in discover.wheel_libraries():
        assert os.path.exists(path)
        assert "libfabric" in os.path.basename(path)


def make_device(root: Path, place: str, name: str, driver: str, numa: str) -> None:
    device = root / "devices" / f"0000:{name}"
    put(device / "numa_node", numa)
    put(root / "drivers" / driver / "module")
    (device / "driver").symlink_to(root / "drivers" / driver)
    entry = root / "class" / place / name
    entry.mkdir(parents=True)
    (entry / "device").symlink_to(device)


def test_devices_are_read_from_sysfs_and_the_nearest_is_taken(tmp_path: Path) -> None:
    make_device(tmp_path, "cxi", "cxi0", "cxi_ss1", "0\n")
    make_device(tmp_path, "cxi", "cxi1", "cxi_ss1", "1\n")
    make_device(tmp_path, "infiniband", "rdmap0", "efa", "-1\n")
    make_device(tmp_path, "infiniband", "mlx5_0", "mlx5_core", "broken")
    devices = discover.fabric_devices(tmp_path)
    assert {device.name: (device.kind, device.numa) for device in devices} == {
        "cxi0": ("cxi", 0),
        "cxi1": ("cxi", 1),
        "rdmap0": ("efa", -1),
        "mlx5_0": ("verbs", -1),
    }
    assert devices[0].pci == "0000:cxi0"
    nearest = discover.nearest_device(devices, "cxi", 1)
    assert nearest is not None
    assert nearest.name == "cxi1"
    assert discover.nearest_device(devices, "opa", 0) is None


@pytest.mark.parametrize(
    ("kinds", "offered", "chosen"),
    [
        (["cxi", "verbs"], ["cxi", "verbs", "tcp"], "cxi"),
        (["cxi"], ["tcp"], "tcp"),  # the device is there, the library cannot drive it
        ([], ["cxi", "efa", "verbs", "tcp"], "tcp"),
        (["efa"], ["efa", "verbs", "tcp"], "efa"),
        (["verbs"], ["shm", "verbs"], "verbs"),
        ([], ["shm"], "local"),
        ([], [], "local"),
    ],
)
def test_the_provider_follows_what_is_there(kinds: list[str], offered: list[str], chosen: str) -> None:
    devices = [Device(f"{kind}0", kind) for kind in kinds]
    choice = discover.explain_provider(Settings(), devices, offered)
    assert choice.name == chosen
    assert choice.why
    named = discover.explain_provider(Settings(provider="shm"), devices, offered)
    assert named == discover.Choice("shm", "EXPERTWIRE_PROVIDER")


HERE = [Interface("eth0", "192.0.2.7", numa=1), Interface("ib0", "198.51.100.7"), Interface("lo", "127.0.0.1")]


def test_the_interface_named_is_taken_or_named_in_the_error() -> None:
    for wanted in ("ib0", "198.51.100.7"):
        assert discover.choose_interface(Settings(interface=wanted), 2, here=HERE).address == "198.51.100.7"
    assert discover.choose_interface(Settings(interface="fe80::1%eth0"), here=HERE).address == "fe80::1%eth0"
    for wanted in ("eth7", "203.0.113.9"):
        with pytest.raises(InvalidArgumentError, match=rf"EXPERTWIRE_INTERFACE='{wanted}'.*eth0 \(192\.0\.2\.7\)"):
            discover.choose_interface(Settings(interface=wanted), here=HERE)


def test_without_a_name_the_route_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert discover.choose_interface(Settings(), 1, here=HERE).name == "lo"
    monkeypatch.setattr(discover, "route_to", lambda peer: "198.51.100.7")
    assert discover.choose_interface(Settings(), 2, peer="198.51.100.8", here=HERE).name == "ib0"
    monkeypatch.setattr(discover, "default_route_interface", lambda: "eth0")
    assert discover.choose_interface(Settings(), 2, here=HERE).name == "eth0"
    monkeypatch.setattr(discover, "default_route_interface", lambda: "")
    with pytest.raises(UnavailableError, match=r"EXPERTWIRE_INTERFACE.*ib0 \(198\.51\.100\.7\)"):
        discover.choose_interface(Settings(), 2, here=HERE)
    assert discover.choose_interface(Settings(), 2, here=HERE[1:]).name == "ib0"


def test_the_loopback_is_found_and_routed_to() -> None:
    assert Interface("lo", "127.0.0.1") in discover.interfaces()
    assert discover.route_to("127.0.0.1") == "127.0.0.1"


def test_the_default_route_with_the_lowest_metric() -> None:
    head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
    rows = "eth1\t00000000\t0100000A\t0003\t0\t0\t200\t00000000\t0\t0\t0\neth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
    assert discover.default_route_interface(head + rows) == "eth0"
    assert discover.default_route_interface(head + "eth0\t000000AC\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n") == ""


def test_cpu_lists() -> None:
    assert discover.parse_cpu_list("0-2,5\n") == {0, 1, 2, 5}
    assert discover.parse_cpu_list("\n") == set()


def matrix_of(size: int, failing: set[tuple[int, int]]) -> list[list[bool]]:
    return [[(i, j) not in failing for j in range(size)] for i in range(size)]


def test_nodes_by_example() -> None:
    assert nodes_from_pairs([]) == ()
    assert nodes_from_pairs(matrix_of(4, set())) == (0, 0, 0, 0)
    assert nodes_from_pairs(matrix_of(4, {(0, 1)})) == (0, 1, 0, 0)  # one direction is enough to split
    two = {(i, j) for i in range(4) for j in range(4) if i % 2 != j % 2}
    assert nodes_from_pairs(matrix_of(4, two)) == (0, 1, 0, 1)
    with pytest.raises(InvalidArgumentError, match="2 rows"):
        nodes_from_pairs([[True, True], [True]])


@settings(deadline=None)
@given(
    st.integers(1, 9).flatmap(lambda size: st.lists(st.lists(st.booleans(), min_size=size, max_size=size), min_size=size, max_size=size))
)
def test_a_node_has_only_proved_pairs_is_greedy_and_numbered_by_first_rank(pairs: list[list[bool]]) -> None:
    nodes = nodes_from_pairs(pairs)
    size = len(pairs)

    def proved(i: int, j: int) -> bool:
        return pairs[i][j] and pairs[j][i]

    assert list(dict.fromkeys(nodes)) == list(range(max(nodes) + 1))
    for i in range(size):
        assert all(proved(i, j) for j in range(size) if i != j and nodes[i] == nodes[j])
        for earlier in range(nodes[i]):  # it could not have joined an earlier node
            assert any(not proved(i, j) for j in range(i) if nodes[j] == earlier)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_real_nodes_come_out_as_they_are(hosts: list[int]) -> None:
    nodes = nodes_from_pairs([[a == b for b in hosts] for a in hosts])
    order = list(dict.fromkeys(hosts))
    assert nodes == tuple(order.index(host) for host in hosts)


def test_a_provider_binds_what_it_can() -> None:
    nics = [Device("cxi0", "cxi", 3), Device("cxi1", "cxi", -1), Device("mlx5_0", "verbs", 0)]
    assert discover.choose_binding(Settings(), "tcp;ofi_rxm") == ("127.0.0.1", "")
    assert discover.choose_binding(Settings(interface="lo"), "verbs", devices=nics) == ("127.0.0.1", "")
    assert discover.choose_binding(Settings(interface="lo"), "shm", hosts=2) == ("", "")  # an address would become its name
    assert discover.choose_binding(Settings(), "cxi", devices=nics)[1] in ("cxi0", "cxi1")
    assert discover.choose_binding(Settings(interface="cxi0"), "cxi", devices=nics) == ("", "cxi0")
    assert discover.choose_binding(Settings(), "efa", devices=nics) == ("", "")
    with pytest.raises(InvalidArgumentError, match="'mlx5_0' is no cxi device of this machine: it has cxi0, cxi1"):
        discover.choose_binding(Settings(interface="mlx5_0"), "cxi", devices=nics)


def test_what_shm_left_behind_is_counted_and_nothing_else(tmp_path: Path) -> None:
    for name in ("41:0:0", "42:0:0", "42:0:1", "other", "torch_42:0:0", "1:2:3:4"):
        put(tmp_path / "shm" / name, "12345")
    put(tmp_path / "proc" / "41" / "stat")
    assert discover.shared_leftovers(tmp_path / "shm", tmp_path / "proc") == (2, 10)
    assert discover.shared_leftovers(tmp_path / "nowhere", tmp_path / "proc") == (0, 0)
