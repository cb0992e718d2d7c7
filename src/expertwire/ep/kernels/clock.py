"""Time and rest within a kernel's wait: the GPU's global timer, or, in Triton's interpreter, the host's clock and a nap."""

from __future__ import annotations

import time

import triton
from triton import knobs
from triton.language.extra.cuda import globaltimer

_NAP_S = 5e-3  # ranks are processes that share few cores in the interpreter: who waits gives its core to who works


def _host_now() -> int:
    return time.monotonic_ns()


def _host_pause() -> None:
    time.sleep(_NAP_S)


@triton.jit
def _device_now():
    return globaltimer()


@triton.jit
def _device_pause():  # nothing: the atomic read of a wait is pause enough
    pass


now = _host_now if knobs.runtime.interpret else _device_now  # nanoseconds
pause = _host_pause if knobs.runtime.interpret else _device_pause  # let others work
