"""A model of context parallel: the rate of each GPU relative to one GPU, from a FLOP rate and two bandwidths.

  python -m benchmarks.context_parallel_model     writes the table for 8 to 1,024 GPUs; needs no GPU

Causal attention on `zigzag_shards`, forward and backward. docs/context_parallel.md derives the formulas and compares
them with measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from benchmarks.methods import BACKWARD_WORK

BYTES = 2  # of an element of q, k, v, and of gradients on their way
MEAN = 0.75  # of a rank's keys that a causal ring sends in a step, on average; the first rank receives all of them
MERGE_BYTES = 6  # per element of a step: a 16-bit part is read, a float32 sum is read and written every second step
COPIES = 4  # reads and writes of an element in the packing and reordering of ulysses
GROUPS = 4  # of heads in ulysses
NODE = 8  # GPUs with NVLink between them


@dataclass(frozen=True)
class Machine:
    """FLOP/s of attention (forward and backward), bytes/s from GPU to GPU in each direction, bytes/s of memory."""

    flops: float
    link: float
    memory: float = 4.0e12


# About an H200's rate, NVLink as messages of 64 MiB measure it, and one 400 Gb/s adapter for each GPU.
WITHIN_NODE, BETWEEN_NODES = Machine(600e12, 150e9), Machine(600e12, 45e9)


@dataclass(frozen=True)
class Model:
    """Seconds of one call. `tokens` and heads of each GPU; `size` GPUs."""

    machine: Machine
    size: int
    tokens: int
    nheads: int
    nheads_k: int
    headdim: int = 128

    def work(self) -> tuple[float, float]:
        """Forward and backward of one step of the ring: a causal block, or half of a full one."""
        forward = 2.0 * self.nheads * self.headdim * self.tokens**2 / self.machine.flops
        return forward, BACKWARD_WORK * forward

    def ring(self) -> float:
        """Messages hide behind the work of a step; in the backward behind work on own keys, too, at any time."""
        forward, backward = self.work()
        steps = self.size - 1
        most = self.tokens * 2 * self.nheads_k * self.headdim * BYTES / self.machine.link
        merged = MEAN * self.tokens * self.headdim * MERGE_BYTES / self.machine.memory
        forward_step = max(forward + merged * self.nheads, most)
        backward_step = backward + merged * (self.nheads + 2 * self.nheads_k)
        # Nothing but the first keys travels before the first step, and nothing but gradients after the last one. Beside
        # the first and the last step, keys or gradients travel, beside the others both: a rank that receives most of
        # the keys receives fewest of the gradients, so their sum is 2 MEAN on average over the steps.
        ends = 2 * most + (backward_step if steps == 1 else 2 * max(backward_step, most))
        through_messages = ends + (steps - 2) * max(backward_step, 2 * MEAN * most) if steps > 1 else ends
        backward_of_all = max(backward + steps * backward_step, through_messages if steps else 0.0)
        return forward + steps * forward_step + backward_of_all

    def ulysses(self) -> float:
        """Of the messages of GROUPS groups of heads, those of one group do not hide behind work."""
        elements = self.tokens * 2 * (self.nheads + self.nheads_k) * self.headdim
        sent = elements * BYTES * (self.size - 1) / self.size / self.machine.link
        copied = elements * BYTES * COPIES / self.machine.memory
        return sum(max(self.size * work, sent) + sent / GROUPS + copied for work in self.work())

    def shares(self) -> dict[str, float]:
        """The rate of each GPU relative to one GPU on the whole sequence, by strategy."""
        ideal = self.size * sum(self.work())
        shares = {"ring": ideal / self.ring()}
        if self.nheads_k % self.size == 0:
            shares["ulysses"] = ideal / self.ulysses()
        return shares


def predicted(row: dict[str, Any]) -> dict[str, float]:
    """The shares for a row of bench_context_parallel: the rate of its GPU, and messages of about the size of its K."""
    if row["kind"] != "causal":
        return {}
    rates = row["message_gbps"]
    mebibytes = row["tokens"] * row["nheads_k"] * row["headdim"] * BYTES / (1 << 20)
    link = rates[min(rates, key=lambda size: abs(math.log(int(size) / mebibytes)))] * 1e9
    machine = Machine(row["tflops"]["one GPU"] * 1e12, link)
    return Model(machine, row["gpus"], row["tokens"], row["nheads"], row["nheads_k"], row["headdim"]).shares()


def rows() -> list[dict[str, Any]]:
    result = []
    for size in (8, 16, 64, 256, 1024):
        machine = WITHIN_NODE if size <= NODE else BETWEEN_NODES
        for nheads, nheads_k in ((16, 16), (32, 8)):
            for tokens in (8192, 32768):
                shares = Model(machine, size, tokens, nheads, nheads_k).shares()
                result.append(
                    {
                        "GPUs": size,
                        "GB/s between GPUs": machine.link * 1e-9,
                        "heads": f"{nheads} on {nheads_k}",
                        "tokens a GPU": tokens,
                        "tokens": size * tokens,
                        **{name: f"{shares[name]:.2f}" if name in shares else "–" for name in ("ring", "ulysses")},
                    }
                )
    return result


def main(argv: list[str] | None = None) -> None:
    from benchmarks import cli  # here, because its tables need this module

    arguments = cli.parser_for(__doc__, seconds=10.0).parse_args(argv)
    cli.finish(
        "context_parallel_model",
        benchmark="context_parallel_model",
        title="Context parallel on paper: the rate of each GPU relative to one GPU",
        data=rows(),
        sources=[],
        arguments=arguments,
        notes=["Computed by the model, not measured; the stamp below is of the machine that computed it."],
    )


if __name__ == "__main__":
    main()
