"""Records the compiled kernels that a call launches, and their arguments, and replays them with other tensors.

A launch through Triton's JIT reads the type, the alignment and the divisibility of each argument, which takes longer
than the rest of the launcher. The key of a recording is everything that determines a call except the contents of its
tensors: all options and numbers, and the shape, strides and dtype of each tensor. A call is replayed only if all of its
addresses are multiples of 16 bytes. So a replay passes the same numbers to the same kernels, and only the addresses
change. A replay has the configuration of the recorded call.

The first call of a kind runs as usual and is recorded. A call that cannot be recorded runs as usual each time: in the
interpreter, while a CUDA graph is captured, with FLASH_ATTN_MINI_TRACE=1, or if a kernel reads a copy of a tensor.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...tracing import VARIABLE as TRACE
from .interpreter import INTERPRETED
from .operands import bind_context, unchecked_descriptor

ALIGNMENT = 16  # bytes; Triton compiles another kernel for an address that is no multiple of it
MAX_RECORDINGS = 4096  # of one kind of call; then all are forgotten
NUMBERS = {type(None), bool, int, float, str}
NOT_YET: Any = object()  # a call that was not recorded yet; None: it cannot be

Make = Callable[[Sequence[Tensor]], Any]


class Launch(NamedTuple):
    """One launch of a compiled kernel."""

    run: Callable[..., object]
    arguments: list[Any]  # in the order of the kernel's parameters
    places: list[tuple[int, Make]]  # arguments that are, or hold, tensors: how to make them


class Recording(NamedTuple):
    """The launches of a call."""

    launches: list[Launch]
    new: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]  # tensors that the call allocates

    def replay(self, given: list[Tensor], device: torch.device) -> list[Tensor] | None:
        """Run the launches on the tensors of a call. Returns the new tensors; None: a new one is not aligned."""
        tensors, new = given.copy(), []
        for shape, strides, dtype in self.new:
            x = given[0].new_empty_strided(shape, strides, dtype=dtype)
            if x.data_ptr() % ALIGNMENT:
                return None
            new.append(x)
        tensors += new
        bind_context(device)
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._run(tensors)
        else:
            self._run(tensors)
        return new

    def _run(self, tensors: list[Tensor]) -> None:
        for run, fixed, places in self.launches:
            arguments = fixed.copy()
            for place, make in places:
                arguments[place] = make(tensors)
            run(*arguments)


class Recorder:
    """Records the launches of one call. ``given``: its tensors, in the order of its arguments."""

    def __init__(self, key: tuple[Any, ...], given: list[Tensor]) -> None:
        self.key = key
        self.given = given
        self.seen: dict[int, Tensor] = {}
        self.launched: list[tuple[Callable[..., object] | None, list[Any]]] = []

    def distinct(self, *values: Any) -> list[Any]:
        """The values, with another view for a tensor that occurs twice, so that its two places can be told apart."""
        return [self._distinct(x) for x in values]

    def _distinct(self, value: Any) -> Any:
        if isinstance(value, tuple):
            parts = [self._distinct(x) for x in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if not isinstance(value, Tensor):
            return value
        if id(value) in self.seen:
            value = value.view_as(value)
        self.seen[id(value)] = value
        return value

    def add(self, kernel: Any, compiled: Any, grid: tuple[int], arguments: Any, keywords: dict[str, Any]) -> None:
        """Note a launch: ``compiled = kernel[grid](*arguments, **keywords)``."""
        parameters = parameters_of(kernel.fn)
        bound = dict(zip(parameters, arguments, strict=False))
        bound.update((name, x) for name, x in keywords.items() if name in parameters)
        in_order = [bound.get(name, parameter.default) for name, parameter in parameters.items()]
        self.launched.append((runner_of(kernel, compiled, grid), in_order))

    def recording(self, as_launched: list[Tensor], new: list[tuple[Tensor, Tensor]]) -> Recording | None:
        """What was recorded; None if it cannot be replayed.

        Args:
            as_launched: The given tensors as the launches passed them: views of them.
            new: Each tensor that the call allocated, as the launches passed it and as the call returns it.
        """
        if not self.launched or any(run is None for run, _ in self.launched):
            return None
        if any(x.data_ptr() != y.data_ptr() for x, y in zip(self.given, as_launched, strict=True)):
            return None  # a copy
        index = {id(x): i for i, x in enumerate([*as_launched, *(x for x, _ in new)])}
        if len(index) != len(as_launched) + len(new):
            return None  # one tensor in two places: another call may have two
        launches = []
        for run, arguments in self.launched:
            assert run is not None
            try:
                made = [(place, make_of(x, index)) for place, x in enumerate(arguments)]
            except KeyError:
                return None
            places = [(place, make) for place, make in made if make is not None]
            for place, _ in places:
                arguments[place] = None
            launches.append(Launch(run, arguments, places))
        if any(x.data_ptr() % ALIGNMENT for x, _ in new):
            return None
        return Recording(launches, [(y.shape, y.stride(), y.dtype) for _, y in new])


@functools.cache
def parameters_of(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a kernel."""
    return inspect.signature(function).parameters


def make_of(argument: Any, index: dict[int, int]) -> Make | None:
    """How to make an argument from the tensors of a call; None for a fixed value. KeyError for an unknown tensor."""
    if isinstance(argument, Tensor):
        place = index[id(argument)]
        return lambda tensors: tensors[place]
    if isinstance(argument, TensorDescriptor):
        place = index[id(argument.base)]
        rest = (argument.shape, argument.strides, argument.block_shape)
        return lambda tensors: unchecked_descriptor(tensors[place], *rest)
    if not isinstance(argument, tuple):
        return None
    parts = [make_of(x, index) for x in argument]
    if not any(parts):
        return None
    if isinstance(argument[0], Tensor) and not any(parts[1:]):
        first, others = index[id(argument[0])], argument[1:]
        return lambda tensors: (tensors[first], *others)
    pairs = list(zip(parts, argument, strict=True))
    return lambda tensors: tuple(x if make is None else make(tensors) for make, x in pairs)


def runner_of(kernel: Any, compiled: Any, grid: tuple[int]) -> Callable[..., object] | None:
    """A function of all arguments of a kernel that launches what Triton compiled for them; None if there is none."""
    if not isinstance(compiled, triton.compiler.CompiledKernel) or kernel.pre_run_hooks:
        return None
    run: Callable[..., object] = compiled[(grid[0], 1, 1)]
    return run


class Recordings:
    """The recordings of one kind of call."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Recording | None] = {}

    def forget(self) -> None:
        """Forget all recordings."""
        self._kept.clear()

    def replay(self, arguments: tuple[Any, ...], device: torch.device) -> tuple[list[Tensor] | None, Recorder | None]:
        """Replay a call if it was recorded: (the tensors that it allocated, None).

        Otherwise (None, a recorder for this call), or (None, None) if it cannot be recorded. arguments: all of the
        call, which are checked.
        """
        if not can_record():
            return None, None
        given: list[Tensor] = []
        parts: list[Any] = [device]
        addresses = 0
        for x in arguments:
            kind = type(x)
            if kind in NUMBERS:  # isinstance of a Tensor takes longer
                parts.append(x)
            elif kind is Tensor or isinstance(x, Tensor):
                if x.is_neg():
                    return None, None
                given.append(x)
                addresses |= x.data_ptr()
                parts.append((x.shape, x.stride(), x.dtype))
            else:
                parts.append(x)
        if addresses % ALIGNMENT:
            return None, None
        key = tuple(parts)
        recording = self._kept.get(key, NOT_YET)
        if recording is NOT_YET:
            return None, Recorder(key, given)
        return (None if recording is None else recording.replay(given, device)), None

    def keep(self, recorder: Recorder, recording: Recording | None) -> None:
        """Keep a recording, or the fact that the call cannot be recorded.

        Not while a CUDA graph is captured: the call may not have its tuned configuration then.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        if len(self._kept) >= MAX_RECORDINGS:
            self._kept.clear()
        self._kept[recorder.key] = recording


def can_record() -> bool:
    """Whether calls are recorded and replayed."""
    return not INTERPRETED and os.environ.get(TRACE, "0") in ("", "0")


def launch(recorder: Recorder | None, kernel: Any, grid: tuple[int], *arguments: Any, **keywords: Any) -> Any:
    """``kernel[grid](*arguments, **keywords)``, noted by the recorder. Returns the compiled kernel."""
    compiled = kernel[grid](*arguments, **keywords)
    if recorder is not None:
        recorder.add(kernel, compiled, grid, arguments, keywords)
    return compiled
