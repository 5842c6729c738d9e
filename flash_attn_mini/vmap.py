"""Dropout under torch.vmap: the argument ``randomness`` of vmap says whether the samples share one mask.

The ops have no batching rule: PyTorch loops over the samples, forward and backward. Only the forward with dropout needs
the kernel that this file registers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _functorch
from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_current_functorch_interpreter
from torch._guards import detect_fake_mode

from .ops import OP_PAIRS, OpPair, library

_MODE = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchVmapMode)
_BATCHED = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)  # excluded: operators act below this vmap


def _register(pair: OpPair) -> None:
    def forward(*arguments: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_MODE):
            options = pair.forward_call(arguments)["options"]
            if options.dropout_p > 0:
                return _forward_with_dropout(pair, arguments)
            return pair.forward(*arguments)

    library.impl(pair.forward._opname, forward, "FuncTorchVmapMode")


def _forward_with_dropout(pair: OpPair, arguments: tuple[Any, ...]) -> Any:
    interpreter = retrieve_current_functorch_interpreter()
    assert isinstance(interpreter, VmapInterpreter)
    randomness, level = interpreter.randomness(), interpreter.level()
    if randomness == "error":
        raise RuntimeError(
            "flash_attn_mini: attention with dropout is called in torch.vmap with randomness='error', its default; "
            "allowed: torch.vmap(..., randomness='different') or 'same', or dropout_p=0"
        )
    is_batched = any(_is_batched(x, level) for x in arguments)
    if randomness == "same" and is_batched:
        return _loop_with_one_mask(pair, arguments, interpreter)
    if randomness == "different" and not is_batched:  # PyTorch's loop then runs once per sample all the same
        q = arguments[0]
        with torch._C._ExcludeDispatchKeyGuard(_BATCHED):
            q = q.expand(interpreter.batch_size(), *q.shape)
        arguments = (_functorch._add_batch_dim(q, 0, level), *arguments[1:])
    return pair.forward(*arguments)


def _loop_with_one_mask(pair: OpPair, arguments: tuple[Any, ...], interpreter: VmapInterpreter) -> Any:
    """Run the op for each sample from the same state of torch's generator."""
    level = interpreter.level()
    if detect_fake_mode() is not None:  # the state would be set while tracing, and not when the program runs
        raise NotImplementedError(
            "flash_attn_mini: torch.vmap with randomness='same' cannot be compiled or exported with dropout; backends "
            "that have it: none. Available: randomness='different', or the same call without torch.compile"
        )
    device = arguments[0].device
    generator = torch.cuda.default_generators[_index(device)] if device.type == "cuda" else torch.default_generator
    dims = [_functorch.maybe_get_bdim(x) if _is_batched(x, level) else None for x in arguments]
    whole = [x if dim is None else _functorch.get_unwrapped(x) for x, dim in zip(arguments, dims, strict=True)]
    with torch._C._ExcludeDispatchKeyGuard(_BATCHED):
        state = generator.get_state()
        samples = []
        for i in range(interpreter.batch_size()):
            generator.set_state(state)
            sample = (x if dim is None else x.select(dim, i) for x, dim in zip(whole, dims, strict=True))
            samples.append(pair.forward(*sample))
        results = [torch.stack(parts) for parts in zip(*samples, strict=True)]
    return tuple(_functorch._add_batch_dim(x, 0, level) for x in results)


def _is_batched(x: Any, level: int) -> bool:
    return isinstance(x, torch.Tensor) and _functorch.is_batchedtensor(x) and _functorch.maybe_get_level(x) == level


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


for _pair in OP_PAIRS:
    _register(_pair)
