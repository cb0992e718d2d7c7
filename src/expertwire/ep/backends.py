"""Which backend a Buffer works with: the CPU's, or a GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from expertwire.errors import InvalidArgumentError, UnavailableError

if TYPE_CHECKING:
    from expertwire.ep.bootstrap import Launch
    from expertwire.ep.cpu.backend import CpuBackend
    from expertwire.ep.cuda.backend import CudaBackend


def device_type(device: object) -> str:
    """ "cpu" or "cuda". None is "cpu". Raises `InvalidArgumentError`, or `UnavailableError` where this machine has no GPU, or no Triton."""
    if device is None:
        return "cpu"
    try:
        kind = str(torch.device(device).type)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise InvalidArgumentError(f"device is {device!r}; it must be 'cpu' or 'cuda': {error}") from None
    if kind not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"device is {device!r}; it must be 'cpu' or 'cuda'")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise UnavailableError(f"device is {device!r} and torch sees no GPU here: install torch for CUDA, or give device='cpu'")
        _require_triton()
    return kind


def _require_triton() -> None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise UnavailableError(f"device is 'cuda' and its kernels need Triton ({error}): pip install 'expertwire[cuda]'") from None


def open_backend(
    launch: Launch,
    device: object,
    *,
    data_bytes: int,
    staging_bytes_max: int,
    local_experts_max: int,
    node_of: Sequence[object] | None,
    provider: str | None,
    timeout_ms: int | None,
    sync_writes: bool | None,
    low_latency: bool,
    shrink: bool,
) -> CpuBackend | CudaBackend:
    """Build this rank's part and wire it to the others. Collective."""
    if device_type(device) == "cuda":
        from expertwire.ep.cuda.backend import CudaBackend

        return CudaBackend.open(
            launch,
            data_bytes=data_bytes,
            local_experts_max=local_experts_max,
            node_of=node_of,
            timeout_ms=timeout_ms,
            low_latency_bytes=staging_bytes_max if low_latency else 0,
            shrink=shrink,
        )
    from expertwire.ep.cpu.backend import CpuBackend

    return CpuBackend.open(
        launch,
        data_bytes=data_bytes,
        staging_bytes_max=staging_bytes_max,
        local_experts_max=local_experts_max,
        node_of=node_of,
        provider=provider,
        timeout_ms=timeout_ms,
        sync_writes=sync_writes,
        low_latency=low_latency,
        shrink=shrink,
    )
