"""Checks and times explicit configurations of the Triton forward kernel on a GPU; tune_triton_backward.py does so for
the backward kernels.

Run `python benchmarks/tune_triton.py`. It needs torch and Triton, not the compiled extension. It prints errors against
float64 first, then one table per problem, best configuration first, each timed alternately with PyTorch's
FLASH_ATTENTION. The results go into backends/triton/configs.py and docs/tuning/triton.md.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

ROOT = Path(__file__).resolve().parent.parent
BATCH, NHEADS = 4, 8

# (head dim, query length, key length, nheads, nheads_k, causal)
CHECKS = [
    (64, 512, 512, 4, 4, False),
    (64, 333, 777, 4, 2, True),
    (128, 512, 512, 4, 4, True),
    (128, 1000, 1000, 4, 1, False),
    (128, 300, 129, 2, 2, True),
    (256, 512, 640, 2, 2, True),
    (96, 257, 511, 2, 2, True),
    (40, 130, 260, 2, 2, False),
]


def import_backend(launcher: str = "launch") -> tuple[Any, Any]:
    """The backend's launcher and configurations, without the package's __init__, which needs the extension."""
    for name in ("flash_attn_mini", "flash_attn_mini.backends"):
        stub = types.ModuleType(name)
        stub.__path__ = [str(ROOT / name.replace(".", "/"))]
        sys.modules.setdefault(name, stub)
    base = "flash_attn_mini.backends.triton"
    return importlib.import_module(f"{base}.{launcher}"), importlib.import_module(f"{base}.configs")


def plain_options(head_dim: int, causal: bool) -> Any:
    """The options of plain attention."""
    options = importlib.import_module("flash_attn_mini.options")
    return options.Options(0.0, head_dim**-0.5, causal, -1, -1, 0.0, None)


def listed_configs(tile: Callable[..., Any], head_dim: int) -> list[Any]:
    """The configurations to time; the most promising first, as time may run out."""
    if head_dim == 64:
        return [
            tile(128, 64, 4, 3),
            tile(128, 64, 8, 3, tma=False),
            tile(64, 128, 4, 2),
            tile(128, 64, 4, 3, tma=False),
            tile(128, 128, 8, 2, maxnreg=128),
            tile(64, 128, 4, 2, tma=False),
            tile(64, 128, 4, 3),
            tile(128, 64, 4, 4),
            tile(128, 64, 4, 2),
            tile(256, 64, 8, 3),
            tile(128, 64, 8, 4, tma=False),
            tile(128, 128, 4, 2),
            tile(64, 64, 4, 3, tma=False),
            tile(64, 64, 4, 4),
            tile(128, 64, 8, 3),
            tile(64, 64, 4, 3),
        ]
    if head_dim == 128:
        return [
            tile(128, 64, 4, 2),
            tile(64, 64, 4, 3),
            tile(128, 64, 8, 3),
            tile(128, 64, 8, 2, maxnreg=128),
            tile(128, 64, 4, 2, tma=False),
            tile(64, 64, 4, 3, tma=False),
            tile(128, 32, 4, 3),
            tile(256, 64, 8, 2),
            tile(256, 64, 8, 3),
            tile(128, 32, 4, 4),
            tile(128, 64, 8, 3, tma=False),
            tile(128, 64, 8, 4),
            tile(64, 64, 4, 4),
        ]
    return [
        tile(128, 64, 8, 2),
        tile(128, 64, 8, 2, tma=False),
        tile(128, 32, 8, 3),
        tile(128, 32, 8, 4),
        tile(64, 32, 4, 2),
        tile(64, 32, 4, 3),
    ]


def label(config: Any) -> str:
    tiles = config.kwargs
    name = f"{tiles['BLOCK_M']:>3}x{tiles['BLOCK_N']:<3} warps {config.num_warps} stages {config.num_stages}"
    return name + (f" maxnreg {config.maxnreg}" if config.maxnreg else "") + ("" if tiles["USE_TMA"] else " no-tma")


def random_inputs(
    batch: int, seqlen_q: int, seqlen_k: int, nheads: int, nheads_k: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def draw(seqlen: int, heads: int) -> torch.Tensor:
        return torch.randn(batch, seqlen, heads, head_dim, dtype=dtype, device="cuda")

    return draw(seqlen_q, nheads), draw(seqlen_k, nheads_k), draw(seqlen_k, nheads_k)


def attention_in(
    dtype: torch.dtype, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [b, s, h, d] and lse [b, h, s], computed in ``dtype``."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.to(dtype).transpose(1, 2) for t in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)
    p = torch.softmax(scores, -1).nan_to_num(0.0)
    return (p @ v).transpose(1, 2), lse


def check(launch: Any, configs: Any) -> bool:
    """Errors of every configuration in the tables against float64, beside PyTorch's in the same 16-bit dtype."""
    print(f"{'case':<44}{'configuration':<40}{'error':>10}{'torch':>10}{'lse error':>11}")
    good = True
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    for dtype in (torch.float16, torch.bfloat16):
        for head_dim, seqlen_q, seqlen_k, nheads, nheads_k, causal in CHECKS:
            q, k, v = random_inputs(2, seqlen_q, seqlen_k, nheads, nheads_k, head_dim, dtype)
            expected, expected_lse = attention_in(torch.float64, q, k, v, causal)
            rival = (attention_in(dtype, q, k, v, causal)[0].double() - expected).abs().max().item()
            case = f"{str(dtype)[6:]} d{head_dim} {seqlen_q}x{seqlen_k} h{nheads}/{nheads_k} causal={causal}"
            for config in configs.FORWARD.candidates(launch.head_dim_block(head_dim), 2, launch.tma_reaches(q), limit):
                call = launch.prepare(q, k, v, plain_options(head_dim, causal))
                out, lse = call.out.fill_(math.nan), call.lse.fill_(math.nan)
                try:
                    launch.launch(call, config)
                    torch.cuda.synchronize()
                except Exception as error:
                    print(f"{case:<44}{label(config):<40}failed: {reason(error)}")
                    good = False
                    continue
                worst = (out.double() - expected).abs().max().item()
                empty = expected_lse == -math.inf
                worst_lse = (lse - expected_lse).masked_fill(empty & (lse == -math.inf), 0.0).abs().max().item()
                passed = worst <= 2 * rival + 1e-5 and worst_lse < 1e-3
                good &= passed
                verdict = "" if passed else "  WRONG"
                print(f"{case:<44}{label(config):<40}{worst:10.2e}{rival:10.2e}{worst_lse:11.2e}{verdict}")
    return good


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:110]}"


def milliseconds(call: Callable[[], Any]) -> float:
    import triton.testing

    return float(triton.testing.do_bench(call, warmup=10, rep=60, return_mode="median"))


def time_problem(
    launch: Any, configs: Any, head_dim: int, seqlen: int, causal: bool, deadline: float
) -> list[tuple[str, float, float]]:
    """(label, TFLOP/s, ratio to FLASH_ATTENTION) of each configuration, best first."""
    q, k, v = random_inputs(BATCH, seqlen, seqlen, NHEADS, NHEADS, head_dim, torch.float16)
    call = launch.prepare(q, k, v, plain_options(head_dim, causal))
    flops = 4 * BATCH * NHEADS * seqlen * seqlen * head_dim / (2 if causal else 1)
    transposed = [t.transpose(1, 2) for t in (q, k, v)]

    def flash() -> torch.Tensor:
        return scaled_dot_product_attention(*transposed, is_causal=causal)

    rows: list[tuple[str, float, float]] = []
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.no_grad():
        for config in listed_configs(configs.tile, head_dim):
            if time.monotonic() > deadline:
                print("  (out of time: the rest of this problem is left out)")
                break
            if config.kwargs["USE_TMA"] and not launch.tma_reaches(q):
                continue
            name = label(config)

            def ours(config: Any = config) -> None:
                launch.launch(call, config)

            try:
                ours()
                torch.cuda.synchronize()
            except Exception as error:
                print(f"  {name:<40} failed: {reason(error)}")
                continue
            pairs = [(milliseconds(ours), milliseconds(flash)) for _ in range(2)]
            ratio = statistics.median(theirs / mine for mine, theirs in pairs)
            rows.append((name, flops / statistics.median(mine for mine, _ in pairs) / 1e9, ratio))
    return sorted(rows, key=lambda row: -row[2])


def main() -> int:
    chooser = argparse.ArgumentParser(add_help=False)
    chooser.add_argument("--direction", choices=("forward", "backward"), default="forward")
    chosen, rest = chooser.parse_known_args()
    if chosen.direction == "backward":
        import tune_triton_backward

        return tune_triton_backward.main(rest)

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[chooser]
    )
    parser.add_argument("--seconds", type=float, default=420.0, help="stop starting measurements after this long")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--top", type=int, default=20, help="rows to print per table")
    parser.add_argument("--skip-check", action="store_true")
    arguments = parser.parse_args(rest)
    if not torch.cuda.is_available():
        print("tune_triton: no GPU here", file=sys.stderr)
        return 2

    deadline = time.monotonic() + arguments.seconds
    torch.manual_seed(0)
    launch, configs = import_backend()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    good = arguments.skip_check or check(launch, configs)
    problems = [(d, s, c) for s in arguments.lengths for d in arguments.head_dims for c in (False, True)]
    for number, (head_dim, seqlen, causal) in enumerate(problems):
        now = time.monotonic()
        share = now + (deadline - now) / (len(problems) - number)
        kind = "causal" if causal else "full"
        print(f"\nd{head_dim} S={seqlen} {kind}, fp16, B={BATCH} H={NHEADS}")
        rows = time_problem(launch, configs, head_dim, seqlen, causal, share)
        print(f"  {'configuration':<40}{'TFLOP/s':>8}{'ratio':>7}")
        for name, tflops, ratio in rows[: arguments.top]:
            print(f"  {name:<40}{tflops:8.1f}{ratio:7.3f}")
    print("\nall checks passed" if good else "\nsome checks FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
