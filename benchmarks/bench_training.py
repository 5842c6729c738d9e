"""Tokens per second of a training step of the GPT in examples/train_char_gpt.py, with this library and with SDPA.

A step is the forward, the backward and AdamW, on random characters. On a GPU it runs under bfloat16 autocast.

  python -m benchmarks.bench_training                     on a GPU
  python -m benchmarks.bench_training --device cpu
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import results
from benchmarks.methods import interleave, progress, ratios, require_gpu, time_cpu
from benchmarks.rivals import Rival
from examples import train_char_gpt as example

CHARACTERS = 128
SHAPES = {"cuda": ((1024, 16), (1024, 64), (16384, 4)), "cpu": ((256, 4), (1024, 1))}  # (context, batch)
KERNELS: dict[str, dict[str, SDPBackend | None]] = {  # of SDPA; None: PyTorch's choice
    "cuda": {
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "FLASH_ATTENTION": SDPBackend.FLASH_ATTENTION,
        "EFFICIENT_ATTENTION": SDPBackend.EFFICIENT_ATTENTION,
    },
    "cpu": {"SDPA": None},
}
ROUNDS = 3


class Contender(Rival):
    """A model whose blocks attend with one implementation."""

    def __init__(self, name: str, attend: example.Attention, kernel: SDPBackend | None = None) -> None:
        self.name = name
        self.attend = attend
        self.kernel = kernel

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with torch.enable_grad(), sdpa_kernel(self.kernel) if self.kernel is not None else contextlib.nullcontext():
            yield


def contenders_for(device: torch.device) -> list[Contender]:
    """This library first, with the backend of the device."""
    ours = Contender(device.type, example.attend_with_flash_attn_mini(device.type))
    kernels = KERNELS[device.type].items()
    return [ours, *(Contender(name, example.attend_with_sdpa, kernel) for name, kernel in kernels)]


def training_steps(size: example.Size, device: torch.device) -> dict[Rival, Callable[[], Any]]:
    """A step of each contender, on equal weights and one batch."""
    torch.manual_seed(0)
    model = example.GPT(CHARACTERS, size, example.attend_with_sdpa).to(device)
    sequences = torch.randint(CHARACTERS, (size.batch, size.context + 1), device=device)
    steps: dict[Rival, Callable[[], Any]] = {}
    for contender in contenders_for(device):
        run = example.Run(copy.deepcopy(model), size)
        for block in run.model.blocks:
            block.attend = contender.attend
        steps[contender] = partial(run.step, sequences)
    return steps


def measure_shape(size: example.Size, device: torch.device, rounds: int, rep_ms: float) -> dict[str, Any]:
    """Tokens per second of every contender, and the first one's speed relative to the others."""
    steps = training_steps(size, device)
    ours, *others = steps
    timings = interleave(steps, time_cpu, rounds=rounds, rep_ms=rep_ms)  # a step waits for the device
    tokens = size.batch * size.context
    return {
        "context": size.context,
        "batch": size.batch,
        "tokens_per_second": {name: round(tokens / timing.ms * 1e3) for name, timing in timings.items()},
        "ratio": ratios(timings, [ours], [rival.name for rival in others]),
    }


def main(argv: list[str] | None = None) -> None:
    parser = results.parser_for(__doc__, seconds=60.0)
    parser.add_argument("--device", choices=sorted(SHAPES), default="cuda")
    arguments = parser.parse_args(argv)
    device = require_gpu("bench_training") if arguments.device == "cuda" else torch.device("cpu")
    shapes = SHAPES[device.type][: 1 if arguments.quick else None]
    size = example.SIZES[device.type]
    rounds = 1 if arguments.quick else ROUNDS
    rep_ms = arguments.seconds * 1e3 / (len(shapes) * len(contenders_for(device)) * rounds)
    data = [
        measure_shape(replace(size, context=context, batch=batch), device, rounds, rep_ms)
        for context, batch in progress(shapes, "training")
    ]
    dtype = "bfloat16 autocast" if device.type == "cuda" else "float32"
    sources = [*results.HOST, *results.SOURCES_OF_BACKEND[device.type], "examples/train_char_gpt.py"]
    model = f"{size.layers} layers, {size.heads} heads of {size.width // size.heads}, {dtype}."
    notes = [model, "Eager: a step of few tokens waits for the host."]
    name, title = f"training_{device.type}", "Training a small GPT"
    results.finish(name, "bench_training", title, data, arguments, sources=sources, notes=notes)


if __name__ == "__main__":
    main()
