"""docs/nixl.md says of every name of NIXL's API, and of ours, what it is here."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from expertwire.compat import nixl
from expertwire.compat.nixl import _api, _bindings, _utils

TEXT = (Path(__file__).parents[2] / "docs" / "nixl.md").read_text(encoding="utf-8")
VERDICTS = {"same", "wider", "nothing to do", "refused", "ours"}
# NIXL's own, from the contract: what callers may call.
METHODS = [
    "create_backend",
    "get_plugin_list",
    "get_plugin_mem_types",
    "get_plugin_params",
    "get_backend_mem_types",
    "get_backend_params",
    "get_reg_descs",
    "get_xfer_descs",
    "register_memory",
    "deregister_memory",
    "query_memory",
    "prep_xfer_dlist",
    "release_dlist_handle",
    "make_prepped_xfer",
    "initialize_xfer",
    "transfer",
    "check_xfer_state",
    "release_xfer_handle",
    "get_xfer_telemetry",
    "get_new_notifs",
    "update_notifs",
    "check_remote_xfer_done",
    "send_notif",
    "get_agent_metadata",
    "get_partial_agent_metadata",
    "add_remote_agent",
    "remove_remote_agent",
    "send_local_metadata",
    "send_partial_agent_metadata",
    "fetch_remote_metadata",
    "invalidate_local_metadata",
    "check_remote_metadata",
    "get_serialized_descs",
    "deserialize_descs",
    "make_connection",
    "estimate_xfer_cost",
    "query_xfer_backend",
    "prep_mem_view",
    "release_mem_view",
    "get_listen_port",
]


def rows() -> list[tuple[list[str], str]]:
    """(names, verdict) of each row of the tables."""
    found = []
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            found.append((re.findall(r"`([\w.]+)`", cells[0]), cells[1]))
    return found


def listed() -> dict[str, str]:
    return {name: verdict for names, verdict in rows() for name in names}


def test_every_row_has_a_verdict() -> None:
    assert len(rows()) > 50
    assert {verdict for _, verdict in rows()} <= VERDICTS


def test_every_method_is_in_the_table() -> None:
    public = {name for name in dir(nixl.nixl_agent) if not name.startswith("_")}
    assert set(METHODS) <= public
    assert public <= set(listed())


def test_every_argument_and_attribute_is_in_the_table() -> None:
    for made in (nixl.nixl_agent, nixl.nixl_agent_config):
        assert set(inspect.signature(made.__init__).parameters) - {"self"} <= set(listed())
    source = inspect.getsource(nixl.nixl_agent.__init__)
    attributes = set(re.findall(r"self\.([a-z]\w*)\b(?:: [^=]+)? = ", source))
    assert attributes
    assert attributes <= set(listed())


def test_every_name_of_the_modules_is_in_the_page() -> None:
    said = set(re.findall(r"`([\w.]+)`", TEXT))
    for module in (nixl, _api, _bindings, _utils):
        assert set(module.__all__) <= said, module.__name__
    assert set(nixl.MODULES) <= said


def test_what_is_ours_is_nobodys_else() -> None:
    ours = {name for name, verdict in listed().items() if verdict == "ours"}
    assert not ours & set(METHODS)
    assert all(name in listed() for name in METHODS)


def test_what_is_refused_raises() -> None:
    refused = {name for name, verdict in listed().items() if verdict == "refused"}
    assert refused == {"prep_mem_view", "release_mem_view", "agent"}
    assert not hasattr(nixl.nixl_agent, "agent")


def test_every_fault_names_a_test_that_exists() -> None:
    begun = TEXT.index("| seen there |")
    lines = [line.split("|") for line in TEXT[begun : TEXT.index("## What callers call")].splitlines() if line.startswith("|")][2:]
    assert len(lines) >= 12
    for _, _, _, cell, _ in lines:
        (name,) = re.findall(r"`(\w+)`", cell)
        (file,) = re.findall(r"in (\w+\.py)", cell) or ["test_nixl_faults.py"]
        assert f"def {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8")
