"""Trains a small character-level GPT with flash_attn_mini and with PyTorch's SDPA, and compares their loss curves.

`python -m examples.train_char_gpt`: equal weights and batches, one step of each run after the other. Rounding
makes two runs diverge. Further SDPA runs measure this, with other kernels and each batch in reverse order.
flash_attn_mini may differ from SDPA by FACTOR times as much as SDPA differs from itself. The text is the manual inside
CPython (pydoc_data.topics, 460 kB of English); --text takes another.

`torchrun --nproc-per-node 2 -m examples.train_char_gpt --context-parallel`: the run of flash_attn_mini spreads each
sequence over the processes (docs/context_parallel.md). Its losses have to be those of one process.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from . import INSTALL

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from tabulate import tabulate
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(f"examples.train_char_gpt: {error}. {INSTALL}") from None

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn_mini
from flash_attn_mini import cp_flash_attn_func, flash_attn_func, zigzag_shards
from flash_attn_mini.context_parallel import Shards

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "build" / "train_char_gpt"
FILES = ("losses.json", "losses.png")
OURS, SDPA = "flash_attn_mini", "SDPA"
# SDPA with other rounding, by device: its kernel, and whether the sequences of a batch are in reverse order. bfloat16
# needs several: differences of 1e-5 grow a hundredfold within 20 steps, earlier in one run than in another. On an H200,
# the differences of two such runs were a factor of 18 apart.
NOISES: dict[str, dict[str, tuple[SDPBackend, bool]]] = {
    "cpu": {"SDPA, unfused, batch reversed": (SDPBackend.MATH, True)},
    "cuda": {
        "SDPA, efficient, batch reversed": (SDPBackend.EFFICIENT_ATTENTION, True),
        "SDPA, flash, batch reversed": (SDPBackend.FLASH_ATTENTION, True),
        "SDPA, unfused": (SDPBackend.MATH, False),
    },
}
# Measured on the CPU over 300 steps, three seeds: the differences of four SDPA runs with different rounding were within
# a factor of 2; an error of 0.1 % in dk gave at least 31 times as much. This holds at the learning rates of SIZES. At
# twice the rate the training is unstable: rounding gave a factor of 35.
FACTOR = 10.0
LOSS_SPACING = 2.0**-21  # of float32 between 4 and 8: the rounding of the loss itself
VALIDATION_BATCHES = 8
LEAST_CONTEXTS = 20  # the shortest text in contexts; its last tenth, for validation, then has two
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [batch, seqlen, heads, headdim] -> the same


@dataclass(frozen=True)
class Size:
    """The model and its training; `context` in characters, `batch` in sequences."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int
    learning_rate: float
    steps: int


SIZES = {
    "cpu": Size(layers=4, heads=4, width=128, context=256, batch=4, learning_rate=1e-3, steps=500),
    "cuda": Size(layers=6, heads=6, width=384, context=1024, batch=16, learning_rate=2e-4, steps=800),
}


def attend_with_flash_attn_mini(backend: str) -> Attention:
    return lambda q, k, v: flash_attn_func(q, k, v, causal=True, backend=backend)


def attend_with_context_parallel(backend: str, shards: Shards) -> Attention:
    return lambda q, k, v: cp_flash_attn_func(q, k, v, shards, causal=True, backend=backend)


def attend_with_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def attend_with_kernel(kernel: SDPBackend) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kernel):
            return attend_with_sdpa(q, k, v)

    return attend


class Block(nn.Module):
    """A transformer block: LayerNorm and attention, LayerNorm and MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int, attend: Attention) -> None:
        super().__init__()
        self.heads = heads
        self.attend = attend
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k and v, `[batch, seqlen, heads, headdim]`, before the rotation."""
        return self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The block's result for the attention's."""
        x = x + self.out(attended.flatten(2))
        return x + self.mlp(self.norm_2(x))

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        q, k, v = self.project(x)
        return self.finish(x, self.attend(rotate(q, rotation), rotate(k, rotation), v))


class GPT(nn.Module):
    """Characters `[batch, seqlen]` to the logits of the characters that follow, `[batch, seqlen, characters]`."""

    rotation: Tensor

    def __init__(self, characters: int, size: Size, attend: Attention) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads, attend) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, characters, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        headdim = size.width // size.heads
        frequencies = 10000.0 ** -(torch.arange(0, headdim, 2) / headdim)
        angles = torch.outer(torch.arange(size.context), frequencies)
        rotation = torch.stack((angles.cos(), angles.sin()))[:, :, None]  # [2, context, 1, headdim / 2]
        self.register_buffer("rotation", rotation, persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """`positions` of the tokens in the sequence; by default they are its first ones."""
        x = self.embedding(tokens)
        rotation = self.rotation[:, : tokens.shape[1]] if positions is None else self.rotation[:, positions]
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021) of `[batch, seqlen, heads, headdim]`, first half with second."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def loss_of(model: nn.Module, sequences: Tensor, shards: Shards | None = None) -> Tensor:
    """Mean cross entropy, in nats, of each character of `[batch, 1 + seqlen]` given those before it.

    With shards: this process's part of it. The sum over the processes is the mean over all characters.
    """
    inputs, targets = sequences[:, :-1], sequences[:, 1:]
    characters, positions = targets.numel(), None
    if shards is not None:
        inputs, targets = shards.split(inputs, 1), shards.split(targets, 1)
        positions = shards.positions.to(sequences.device)
    with torch.autocast(sequences.device.type, torch.bfloat16, enabled=sequences.device.type == "cuda"):
        logits = model(inputs) if positions is None else model(inputs, positions)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum") / characters


@dataclass
class Run:
    """One training: a model with its attention, and its losses and times."""

    model: GPT
    size: Size
    reverse: bool = False  # the sequences of each batch
    shards: Shards | None = None  # who has which characters of a sequence, where it is spread over processes
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation: float = math.nan

    def __post_init__(self) -> None:
        rate, steps = self.size.learning_rate, self.size.steps
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.1)
        warmup = max(1, steps // 10)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        )

    def step(self, sequences: Tensor) -> None:
        if self.reverse:
            sequences = sequences.flip(0)
        start = time.perf_counter()
        loss = loss_of(self.model, sequences, self.shards)
        self.optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if self.shards is not None:
            for x in (loss, *(p.grad for p in self.model.parameters() if p.grad is not None)):
                dist.all_reduce(x, group=self.shards.group)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.item())  # waits for the device
        self.seconds.append(time.perf_counter() - start)

    @torch.no_grad()
    def validate(self, batches: Sequence[Tensor]) -> None:
        losses = torch.stack([loss_of(self.model, batch, self.shards) for batch in batches])
        if self.shards is not None:
            dist.all_reduce(losses, group=self.shards.group)
        self.validation = losses.mean().item()


class Text:
    """A text as numbers, the last tenth of it kept for validation."""

    def __init__(self, text: str) -> None:
        self.alphabet = sorted(set(text))
        number = {character: i for i, character in enumerate(self.alphabet)}
        tokens = torch.tensor([number[character] for character in text])
        self.training, self.validation = tokens.split([len(tokens) - len(tokens) // 10, len(tokens) // 10])

    def draw(self, tokens: Tensor, size: Size, generator: torch.Generator, device: torch.device) -> Tensor:
        """A batch of random pieces, `[batch, 1 + context]`."""
        starts = torch.randint(len(tokens) - size.context, (size.batch,), generator=generator)
        return torch.stack([tokens[i : i + size.context + 1] for i in starts.tolist()]).to(device)


def read_text(path: Path | None) -> str:
    """Raises OSError, UnicodeDecodeError or ImportError."""
    if path is not None:
        return path.read_text(encoding="utf-8")
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def make_runs(
    text: Text, size: Size, device: torch.device, backend: str, seed: int, shards: Shards | None = None
) -> dict[str, Run]:
    """All runs, with equal weights. With shards, the sequences of the run OURS are spread over processes."""
    torch.manual_seed(seed)
    model = GPT(len(text.alphabet), size, attend_with_sdpa).to(device)
    runs = {}
    ours = attend_with_flash_attn_mini(backend) if shards is None else attend_with_context_parallel(backend, shards)
    attentions = {OURS: (ours, False), SDPA: (attend_with_sdpa, False)}
    noises = NOISES[device.type].items()
    attentions |= {name: (attend_with_kernel(kernel), reverse) for name, (kernel, reverse) in noises}
    for name, (attend, reverse) in attentions.items():
        runs[name] = Run(copy.deepcopy(model), size, reverse)
        for block in runs[name].model.blocks:
            block.attend = attend
    runs[OURS].shards = shards
    return runs


def train(runs: dict[str, Run], text: Text, size: Size, device: torch.device, seed: int) -> None:
    """Train all runs on the same batches, one step of each after the other: timings share the machine's load."""
    generator = torch.Generator().manual_seed(seed)
    order = list(runs.values())
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    bar = tqdm(range(size.steps), desc="training", unit="step", disable=None if is_first else True)
    for step in bar:
        sequences = text.draw(text.training, size, generator, device)
        for run in order:
            run.step(sequences)
        order.append(order.pop(0))
        if step % 10 == 0:
            bar.set_postfix_str(f"loss {runs[OURS].losses[-1]:.3f}, of SDPA {runs[SDPA].losses[-1]:.3f}")
    batches = [text.draw(text.validation, size, generator, device) for _ in range(VALIDATION_BATCHES)]
    for run in runs.values():
        run.validate(batches)


@dataclass(frozen=True)
class Agreement:
    """The largest difference of flash_attn_mini's losses from SDPA's up to each step, and the largest allowed."""

    difference: list[float]
    allowed: list[float]

    @property
    def worst(self) -> int:
        """The step with the largest difference relative to the allowed one."""
        return max(range(len(self.difference)), key=lambda step: self.difference[step] / max(self.allowed[step], 1e-30))

    @property
    def passed(self) -> bool:
        return all(difference <= allowed for difference, allowed in zip(self.difference, self.allowed, strict=True))

    def __str__(self) -> str:
        step = self.worst
        return (
            f"{'agree' if self.passed else 'DO NOT AGREE'} within noise. Up to each step, a difference may be "
            f"{FACTOR:g} times that of SDPA\nwith other rounding, plus the spacing of float32. It was "
            f"{self.difference[-1]:.1e} at the end, and nearest to the bound\nat step {step + 1}: "
            f"{self.difference[step]:.1e} of {self.allowed[step]:.1e}"
        )


def largest_so_far(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """The largest |a - b| up to each step; infinity from the first NaN or infinity on."""
    differences = (torch.tensor(a, dtype=torch.float64) - torch.tensor(b, dtype=torch.float64)).abs()
    return differences.nan_to_num(nan=math.inf, posinf=math.inf).cummax(0).values.tolist()


def compare(ours: Sequence[float], sdpa: Sequence[float], *noises: Sequence[float]) -> Agreement:
    """Compare the losses of flash_attn_mini with SDPA's, relative to those of SDPA runs with other rounding."""
    far_so_far = zip(*(largest_so_far(noise, sdpa) for noise in noises), strict=True)
    allowed = [FACTOR * (max(far) + LOSS_SPACING) for far in far_so_far]
    return Agreement(largest_so_far(ours, sdpa), [-math.inf if math.isinf(far) else far for far in allowed])


@torch.no_grad()
def sample(model: GPT, text: Text, size: Size, device: torch.device, seed: int, length: int) -> str:
    """Text that the model writes after a newline."""
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.full((1, 1), text.alphabet.index("\n") if "\n" in text.alphabet else 0, device=device)
    for _ in range(length):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(tokens[:, -size.context :])[0, -1].float()
        following = torch.multinomial((logits / 0.8).softmax(dim=0), 1, generator=generator)
        tokens = torch.cat((tokens, following[None]), dim=1)
    return "".join(text.alphabet[token] for token in tokens[0].tolist()).strip()


def plot(runs: dict[str, Run], agreement: Agreement, title: str, path: Path) -> None:
    figure, (above, below) = plt.subplots(2, figsize=(8, 6), sharex=True, layout="constrained", height_ratios=(3, 2))
    steps = range(1, len(agreement.difference) + 1)
    for name, style in ((SDPA, "-"), (OURS, "--")):
        above.plot(steps, runs[name].losses, style, label=name, linewidth=1)
    above.set_ylabel("training loss, nats a character")
    above.set_title(title, fontsize=10)
    reference = torch.tensor(runs[SDPA].losses, dtype=torch.float64)
    noises = [name for name in runs if name not in (OURS, SDPA)]
    for name in (*noises, OURS):
        differences = (torch.tensor(runs[name].losses, dtype=torch.float64) - reference).abs()
        label = "SDPA with other rounding − SDPA" if name == noises[0] else f"{OURS} − SDPA" if name == OURS else None
        colour = "C1" if name == OURS else "0.6"
        below.plot(steps, differences.clamp(min=1e-8), ".", markersize=2, color=colour, label=label)
    below.plot(steps, agreement.allowed, color="C3", linewidth=1, label="largest allowed so far")
    below.set_yscale("log")
    below.set_ylabel("difference (0 at 1e-8)")
    below.set_xlabel("step")
    for axis in (above, below):
        axis.grid(alpha=0.3)
    above.legend(fontsize=8)
    below.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, markerscale=3)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def write_results(
    out: Path, runs: dict[str, Run], agreement: Agreement, setting: dict[str, object], title: str
) -> None:
    results = {
        name: {
            "losses": run.losses,
            "validation_loss": run.validation,
            "median_seconds_per_step": statistics.median(run.seconds),
        }
        for name, run in runs.items()
    }
    result = {"setting": setting, "agrees": agreement.passed, "runs": results}
    out.mkdir(parents=True, exist_ok=True)
    (out / FILES[0]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot(runs, agreement, title, out / FILES[1])


def print_table(runs: dict[str, Run]) -> None:
    rows = []
    for name, run in runs.items():
        far = largest_so_far(run.losses, runs[SDPA].losses)[-1]
        last = statistics.fmean(run.losses[-max(1, len(run.losses) // 20) :])
        milliseconds = statistics.median(run.seconds) * 1e3
        rows.append([name, f"{last:.4f}", f"{run.validation:.4f}", f"{far:.1e}", f"{milliseconds:.1f}"])
    headers = ["attention", "loss, last 5 %", "validation loss", "largest difference from SDPA", "ms a step"]
    print(tabulate(rows, headers, colalign=("left", *["right"] * 4), disable_numparse=True))


def parser_for(module: str, doc: str | None, steps: Mapping[str, int]) -> argparse.ArgumentParser:
    """The arguments of every example that trains this GPT; `steps` by device."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=doc, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if PyTorch sees a GPU"
    )
    parser.add_argument("--backend", help="of flash_attn_mini (default: the best of the device)")
    parser.add_argument("--steps", type=int, help=f"default: {steps['cpu']} on the CPU, {steps['cuda']} on a GPU")
    parser.add_argument("--text", type=Path, help="a UTF-8 file to learn from (default: Python's own manual)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    return parser


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> tuple[torch.device, str, str]:
    """Device, backend and text; or an error message and exit status 2, before any work."""
    if arguments.device == "auto":
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no CUDA GPU")
    device = torch.device(arguments.device)
    backends = flash_attn_mini.available_backends(device)
    if arguments.backend is None and not backends:
        parser.error(f"no backend of flash_attn_mini runs on {device}; python -m flash_attn_mini prints why")
    if arguments.backend not in (None, *backends):
        parser.error(f"--backend {arguments.backend}: allowed on {device}: {', '.join(backends)}")
    if arguments.steps is not None and arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: at least 1")
    try:
        content = read_text(arguments.text)
    except ImportError:
        parser.error("this Python comes without pydoc_data.topics; name a text with --text FILE")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--text {arguments.text}: {error}")
    least = LEAST_CONTEXTS * SIZES[device.type].context
    if len(content) < least:
        parser.error(f"--text {arguments.text}: has {len(content)} characters; at least {least} are needed")
    return device, arguments.backend or backends[0], content


def join_processes(parser: argparse.ArgumentParser, device: torch.device) -> None:
    """Join the group of torchrun's processes, each with a GPU of its own; or an error message and exit status 2."""
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        parser.error("--context-parallel: start it with torchrun, such as torchrun --nproc-per-node 2 -m ...")
    if device.type != "cuda":
        dist.init_process_group("gloo")
        return
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # docs/context_parallel.md says why
    options.config.max_ctas, options.config.cga_cluster_size = 16, 1
    dist.init_process_group("nccl", pg_options=options)


def check_out(parser: argparse.ArgumentParser, out: Path) -> None:
    """An error message and exit status 2 for a folder that cannot take the files."""
    for path in (out / name for name in FILES):
        if path.exists():
            parser.error(f"--out {out}: {path} exists and is not overwritten")
    if out.exists() and not out.is_dir():
        parser.error(f"--out {out}: not a folder")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when the loss curves agree, 1 when they do not."""
    parser = parser_for("examples.train_char_gpt", __doc__, {name: size.steps for name, size in SIZES.items()})
    parser.add_argument("--out", type=Path, help="a folder for losses.json and losses.png, which must not exist in it")
    parser.add_argument("--context-parallel", action="store_true", help="spread sequences over torchrun's processes")
    arguments = parser.parse_args(argv)
    if arguments.out is not None:
        check_out(parser, arguments.out)
    device, backend, content = check(parser, arguments)
    if arguments.context_parallel:
        join_processes(parser, device)
    size = SIZES[device.type]
    if arguments.steps is not None:
        size = replace(size, steps=arguments.steps)
    text = Text(content)
    out = arguments.out or DEFAULT_OUT

    shards = zigzag_shards(size.context, None) if arguments.context_parallel else None
    is_first = shards is None or shards.rank == 0
    runs = make_runs(text, size, device, backend, arguments.seed, shards)
    parameters = sum(parameter.numel() for parameter in runs[SDPA].model.parameters())
    dtype = "bfloat16 autocast" if device.type == "cuda" else f"float32, threads: {torch.get_num_threads()}"
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    title = (
        f"GPT of {parameters / 1e6:.1f} M parameters, {size.layers} layers, {size.heads} heads of "
        f"{size.width // size.heads}, {size.batch} × {size.context} characters a step\n"
        f"{machine}, {dtype}, backend {backend}, seed {arguments.seed}"
    )
    if shards is not None:
        title += f", each sequence over {shards.size} processes"
    if is_first:
        print(f"{title}\n{len(content)} characters of text, {len(text.alphabet)} different ones", flush=True)
    train(runs, text, size, device, arguments.seed)

    agreement = compare(*(run.losses for run in runs.values()))
    if not is_first:
        return 0 if agreement.passed else 1
    setting = asdict(size) | {"device": machine, "dtype": dtype, "backend": backend, "seed": arguments.seed}
    write_results(out, runs, agreement, setting | {"torch": torch.__version__}, title)
    if agreement.passed:
        for block in runs[OURS].model.blocks:
            block.attend = attend_with_flash_attn_mini(backend)
        print(f"\n{sample(runs[OURS].model, text, size, device, arguments.seed, length=300)}\n")
    print_table(runs)
    print(f"\nthe loss curves {agreement}\nwritten: {out / FILES[1]}, {FILES[0]}")
    return 0 if agreement.passed else 1


if __name__ == "__main__":
    status = main()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(status)
