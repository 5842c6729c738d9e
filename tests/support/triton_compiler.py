"""Compiles the kernels of calls of the Triton launchers for a GPU that this machine may not have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

HOPPER = 90
SHARED_MEMORY = {90: 232448, 80: 166912, 86: 101376}  # bytes of a block, by compute capability


class CompilesOnly:
    """A driver of Triton for a GPU of some compute capability, on which nothing is launched."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> Any:
        return f"sm_{self.capability}"  # another key than that of a GPU of this machine

    def get_current_stream(self, device: Any = None) -> int:
        return 0


@contextlib.contextmanager
def compiled_kernels(capability: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """Collects (name, compiled kernel) of every launch in the ``with`` block, in place of the launch.

    The calls have CPU tensors. A call takes the configuration that this GPU would take without timing.
    """
    from triton.runtime import driver

    from flash_attn_mini.backends.triton import kvcache, launch, launch_bwd, operands, recording, tuner

    compiled: list[tuple[str, Any]] = []

    def compile_launch(recorder: Any, kernel: Any, grid: Any, *arguments: Any, **keywords: Any) -> Any:
        compiled.append((kernel.fn.__name__, kernel.warmup(*arguments, grid=grid, **keywords)))
        return compiled[-1][1]

    def limit(device: torch.device) -> int:
        return SHARED_MEMORY[capability]

    with monkeypatch.context() as patch:
        patch.setenv(tuner.ENVIRONMENT_VARIABLE, "0")
        patch.setattr(recording, "launch", compile_launch)
        patch.setattr(recording, "can_record", lambda: False)
        patch.setattr(operands, "has_tma", lambda device: capability >= HOPPER)
        patch.setattr(tuner, "shared_memory_limit", limit)
        patch.setattr(kvcache, "shared_memory_limit", limit)
        patch.setattr(kvcache, "num_sms", lambda device: 132)
        patch.setattr(kvcache, "starts_early", lambda device: capability >= HOPPER)
        patch.setattr(kvcache, "programs_per_sm", lambda *_: 1)
        patch.setattr(kvcache, "_chosen", {})
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        for module in (launch, launch_bwd):
            patch.setattr(module, "bind_context", lambda device: None)
        for one in (launch.TUNER, launch_bwd.DQ_TUNER, launch_bwd.DKV_TUNER, launch_bwd.DV_TUNER):
            patch.setattr(one, "chosen", {})
        before = dict(vars(driver))  # reset_active raises where there is no GPU
        driver.set_active(CompilesOnly(capability))
        try:
            yield compiled
        finally:
            vars(driver).update(before)
