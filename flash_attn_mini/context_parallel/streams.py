"""A second stream of a GPU, for work that waits for messages while the current stream has other work."""

from __future__ import annotations

import functools
from types import TracebackType
from typing import Any

import torch


class SideStream:
    """A second stream of a device; work inside the context runs on it.

    On the CPU, and with None, there is no such stream: work stays on the current one.

    Its work starts after the work that was on the current stream when the object was made. Its kernels have the higher
    priority: when a thread block ends, its SM goes to them first.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._context: Any = None
        self._current: Any = None
        self._side: Any = None
        if device is not None and device.type == "cuda":
            self._current, self._side = torch.cuda.current_stream(device), side_stream_of(device)
            self._side.wait_stream(self._current)

    def __enter__(self) -> None:
        if self._side is not None:
            self._context = torch.cuda.stream(self._side)
            self._context.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._context is not None:
            self._context.__exit__(kind, error, trace)
            self._context = None

    def join(self) -> None:
        """Let the current stream wait for the work of this one."""
        if self._current is not None:
            self._current.wait_stream(self._side)

    def leave(self) -> None:
        """Let later work of this stream wait for the current stream, which may read memory of this one until then.

        The caching allocator gives freed memory to later work of the stream that it was allocated on, without a wait.
        So the caller keeps such memory until it has called this. ``record_stream`` would keep it until the GPU has
        caught up with the host.
        """
        if self._side is not None:
            self._side.wait_stream(self._current)


@functools.cache  # one for each device, because every stream has separate memory in the caching allocator
def side_stream_of(device: torch.device) -> torch.cuda.Stream:
    """The side stream of a device."""
    return torch.cuda.Stream(device, priority=-1)
