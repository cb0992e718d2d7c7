"""OpenAI's HTTP API in front of prefill and decode servers of vLLM, by its kv_transfer_params.

    expertwire proxy --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000 --port 8000

Runs until SIGTERM or Ctrl-C, then finishes what it has begun; a second signal ends it at once. Its log goes to stderr, one JSON object a
line. docs/proxy.md of the sources explains each setting; a flag wins over --config."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path
from typing import Any

from expertwire.cli.report import Exit, Report, RowStatus
from expertwire.errors import InvalidArgumentError, UnavailableError

_FLAGS = {  # option: key of the configuration
    "host": "host",
    "port": "port",
    "workers": "workers",
    "policy": "policy",
    "batch": "batch",
    "decode_alone_below": "decode_alone_below_tokens",
    "allow_decode_alone": "allow_decode_alone",
    "in_flight_limit": "in_flight_limit",
    "admin_host": "admin__host",
    "admin_port": "admin__port",
    "ca_file": "tls__ca_file",
    "log_level": "log__level",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `expertwire proxy`."""
    parser.add_argument("--prefill", nargs="+", metavar="URL", help="prefill servers: http(s)://HOST:PORT, or NAME=URL")
    parser.add_argument("--decode", nargs="+", metavar="URL", help="decode servers")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings as TOML")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default 8000; 0: any, see the log)")
    parser.add_argument("--workers", type=int, help="processes that share the port (default 1)")
    parser.add_argument("--policy", choices=("round_robin", "least_loaded", "session"), help="which server (default least_loaded)")
    parser.add_argument("--batch", choices=("split", "decode"), help="several prompts or n > 1: split, or decode alone (default split)")
    parser.add_argument("--decode-alone-below", type=int, metavar="TOKENS", help="shorter prompts go to decode alone (default 0)")
    parser.add_argument(
        "--allow-decode-alone", action="store_const", const=True, help="if no prefill server can be reached, decode computes all"
    )
    parser.add_argument("--in-flight-limit", type=int, metavar="N", help="of a worker; more are answered 429 (default 4096)")
    parser.add_argument("--admin-host", help="of the endpoint that adds and removes servers (default 127.0.0.1)")
    parser.add_argument("--admin-port", type=int, help="its port (default 0: there is none)")
    parser.add_argument("--ca-file", metavar="FILE", help="certificates for https servers (default: the system's)")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), help="default info")
    parser.add_argument("--check", action="store_true", help="say whether the settings can be meant and the ports are free, and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was counted to FILE at the end")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. FAILED if something had to be cut off at the end."""
    try:
        module: Any = importlib.import_module("expertwire.proxy.workers")
    except ImportError as error:
        raise UnavailableError(f"the proxy needs {error.name}: pip install 'expertwire[proxy]'") from error
    config = _configuration(args)
    if args.check:
        server: Any = importlib.import_module("expertwire.proxy.server")
        server.try_start(config)
        report = Report("proxy", {"prefill": len(config.prefill), "decode": len(config.decode)})
        report.add("settings", 1, "", RowStatus.OK)
        report.write(args.json)
        print(f"{len(config.prefill)} prefill and {len(config.decode)} decode servers; the settings can be meant, the ports are free")
        return Exit.OK
    finished, counted = module.run(config, _write_stderr)
    report = Report("proxy", {"prefill": len(config.prefill), "decode": len(config.decode), "workers": config.workers})
    for (endpoint, outcome), count in sorted(counted.items()):
        report.add("requests", count, "", RowStatus.OK, endpoint=endpoint, outcome=outcome)
    report.add("shutdown", 1, "", RowStatus.OK if finished else RowStatus.FAILED)
    report.write(args.json)
    return report.exit_status()


def _configuration(args: argparse.Namespace) -> Any:
    config: Any = importlib.import_module("expertwire.proxy.config")
    if args.config is None and not (args.prefill and args.decode):
        raise InvalidArgumentError("give --prefill URL and --decode URL, or --config FILE")
    changes = {key: getattr(args, option) for option, key in _FLAGS.items()}
    for side in ("prefill", "decode"):
        words = getattr(args, side)
        changes[side] = config.servers_of(words) if words else None
    base = config.load(args.config, servers=False) if args.config is not None else config.Config()
    return config.override(base, **changes)


def _write_stderr(data: bytes) -> None:
    while data:
        data = data[os.write(2, data) :]
