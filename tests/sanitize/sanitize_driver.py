"""Runs the small cases, forward and backward, on the cuda backend, without pytest (`make sanitize`).

memcheck takes every small case: dense, varlen and KV cache, with and without features, and with `--wrong-values` calls
with numbers out of range in GPU memory. racecheck is slow: `--per-headdim` limits the number of cases of each head dim,
mask and feature. `--of kvcache` runs only those of a KV cache. `--part 1 4` runs every fourth case, from the second
on: four processes share the cases.

    compute-sanitizer --tool memcheck --error-exitcode 9 python -m tests.sanitize.sanitize_driver
    compute-sanitizer --tool racecheck --error-exitcode 9 python -m tests.sanitize.sanitize_driver --per-headdim 2 64
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import itertools
import os
import time
from collections.abc import Iterable

import torch
from torch import Tensor

from benchmarks.rivals import kernels_of
from flash_attn_mini import flash_attn_func, flash_attn_varlen_func
from flash_attn_mini.backends.cuda import sm80_unavailable_reason
from tests.api.test_kvcache_errors import HOSTILE
from tests.gpu.test_gpu_memory import WRONG_LENGTHS
from tests.support.cases import SMALL_FORWARD_CASES, Case, make_dlse, make_dout, make_inputs, options_of
from tests.support.feature_cases import SMALL_FEATURE_CASES
from tests.support.kvcache_cases import SMALL_KVCACHE_CASES, SMALL_LATENT_CASES, KvCacheCase, make_call
from tests.support.kvcache_checks import run as run_call
from tests.support.varlen_cases import SMALL_VARLEN_CASES, VarlenCase, make_batch

AnyCase = Case | VarlenCase | KvCacheCase

# Head dims of SMALL_VARLEN_CASES with features: 64 and less.
VARLEN_FEATURES = [
    dataclasses.replace(case, name=f"{case.name}_{headdim}", headdim=headdim)
    for case in SMALL_VARLEN_CASES
    if case.name in ("softcap", "dropout", "together")
    for headdim in (96, 128, 192, 256)
]
# One head with so many steps that every stage of Hopper's pipelines is filled at least three times.
LONG: list[AnyCase] = [
    Case(f"long_{name}_{headdim}", "stages are used again", 1, 1, 1, rows, 200, headdim, **options)
    for headdim, rows in ((64, 1100), (96, 600), (128, 600), (192, 420), (256, 420))
    for name, options in (
        ("full", {}),
        ("causal", {"causal": True}),
        ("softcap", {"softcap": 10.0}),
        ("dropout", {"dropout_p": 0.1, "causal": True}),
    )
] + [
    VarlenCase(f"long_varlen_{headdim}", "the same in kind varlen", (1000, 33), (170, 90), 1, 1, headdim)
    for headdim in (64, 128)
]
# CTAs enough for 132 SMs, so that each sums several heads of a group (heads_per_cta in csrc/api/allocation.cpp), or has
# two key blocks (key_blocks_of_cta in csrc/sm90/backward/flash_bwd_launch_template.h).
GROUPS: list[AnyCase] = [
    *(
        Case(f"groups_{headdim}", "a CTA sums the heads of a group", 1, 180, 90, 150, 300, headdim)
        for headdim in (64, 128)
    ),
    Case("key_blocks", "a CTA has two key blocks", 4, 90, 90, 260, 260, 64, causal=True),
]
# Keys enough for one pass of the backward (prefers_dq_pass in csrc/dispatch/choose_kernel.h). The second CTA of the
# last pair has no key, or some.
PAIRS: list[AnyCase] = [
    Case("pairs_full", "two CTAs share 128 keys", 1, 1, 1, 420, 1090, 256),
    Case("pairs_causal", "two CTAs share 128 keys", 1, 2, 1, 300, 1200, 256, causal=True),
    VarlenCase("pairs_varlen", "two CTAs share 128 keys", (300, 33), (1100, 90), 1, 1, 256),
]
CASES: dict[str, list[AnyCase]] = {
    "attention": [
        *SMALL_FORWARD_CASES,
        *SMALL_FEATURE_CASES,
        *SMALL_VARLEN_CASES,
        *VARLEN_FEATURES,
        *LONG,
        *GROUPS,
        *PAIRS,
    ],
    "kvcache": [*SMALL_KVCACHE_CASES, *SMALL_LATENT_CASES],
}
ROWS = (16, 32, 64, 128)  # of a group, at most: few rows, warp pairs, one and two consumer warpgroups of Hopper
BATCHES = (1, 16)  # sequences, at most: clusters; few heads and many heads for a CTA
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def size(case: AnyCase) -> int:
    if isinstance(case, VarlenCase):
        return sum(q * k for q, k in zip(case.lengths_q, case.lengths_k, strict=True))
    if isinstance(case, KvCacheCase):
        return case.seqlen_q * sum(case.totals)
    return case.seqlen_q * case.seqlen_k


def kind_of(case: AnyCase) -> tuple[object, ...]:
    """The features of a case that select its kernel; cases of one kind run similar code."""
    features: list[object] = [case.window_size != (-1, -1), case.softcap > 0, case.alibi is not None]
    if isinstance(case, KvCacheCase):
        features += [case.leftpad is not None, case.rotary_dim > 0, case.num_splits > 0, case.split_keys > 0]
        features += [bisect.bisect_left(BATCHES, case.batch), bisect.bisect_left(ROWS, case.group_rows)]
    else:
        features.append(case.dropout_p > 0)
    return (type(case), getattr(case, "page_size", 0) > 0, case.headdim, case.causal, *features)


def choose(headdims: list[int], per_headdim: int | None, of: str | None = None) -> list[AnyCase]:
    """The small cases of these head dims (all when none is named), at most `per_headdim` of each kind.

    `of` is a key of CASES, or None for all of them. The largest cases come first: they have the most steps, and so the
    most chances of a race.
    """
    chosen: list[AnyCase] = []
    taken: dict[tuple[object, ...], int] = {}
    every = CASES[of] if of else itertools.chain.from_iterable(CASES.values())
    for case in sorted(every, key=lambda case: -size(case)):
        if headdims and case.headdim not in headdims:
            continue
        kind = kind_of(case)
        taken[kind] = taken.get(kind, 0) + 1
        if per_headdim is None or taken[kind] <= per_headdim:
            chosen.append(case)
    return chosen


def archs_of(case: AnyCase | None = None) -> list[int | None]:
    """The arguments of kernels_of for a case, or for any call up to head dim 256: None, and 80 if the build has the
    kernels of sm80 for this GPU."""
    if isinstance(case, KvCacheCase) and case.v_in_k:
        return [None] if torch.cuda.get_device_capability()[0] == 9 else []
    return [None] if sm80_unavailable_reason() else [None, 80]


def run(case: AnyCase, dtype: torch.dtype) -> None:
    """Runs every kernel that takes the case, with the default backward and with the deterministic one."""
    for arch in archs_of(case):
        with kernels_of(arch):
            if isinstance(case, KvCacheCase):
                assert_finite(case, [run_call(make_call(case, dtype, "cuda", seed=0), "cuda")[0]])
                continue
            for deterministic in (False, True):
                run_case = run_varlen if isinstance(case, VarlenCase) else run_dense
                assert_finite(case, run_case(case, dtype, deterministic))


def assert_finite(case: AnyCase, results: list[Tensor]) -> None:
    for name, result in zip(("out", "dq", "dk", "dv"), results, strict=False):
        if not bool(result.isfinite().all()):
            raise SystemExit(f"{case.name}, {result.dtype}: {name} is not finite; {case.shape}")


def run_dense(case: Case, dtype: torch.dtype, deterministic: bool) -> list[Tensor]:
    q, k, v = (x.requires_grad_() for x in make_inputs(case, dtype, "cuda", seed=0))
    dout, dlse = make_dout(case, dtype, "cuda", seed=0), make_dlse(case, dtype, "cuda", seed=0)
    options = options_of(case, "cuda")
    out, lse, _ = flash_attn_func(
        q, k, v, **options, deterministic=deterministic, return_attn_probs=True, backend="cuda"
    )
    return [out, *torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))]


def run_varlen(case: VarlenCase, dtype: torch.dtype, deterministic: bool) -> list[Tensor]:
    batch = make_batch(case, dtype, "cuda", seed=0)
    inputs = [x.requires_grad_(not case.page_size) for x in (batch.q, batch.k, batch.v)]
    options = options_of(case, "cuda")
    out = flash_attn_varlen_func(
        *inputs,
        *batch.lengths,
        **options,
        deterministic=deterministic,
        block_table=batch.block_table,
        backend="cuda",
    )
    return [out] if case.page_size else [out, *torch.autograd.grad(out, inputs, batch.dout)]


def run_wrong_lengths(names: Iterable[str]) -> None:
    """Runs calls whose cu_seqlens point outside of the tensors, which kernels must clamp."""
    calls = itertools.product(names, (64, 96, 128, 192, 256), (False, True), archs_of())
    for name, headdim, deterministic, arch in calls:
        lengths = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in WRONG_LENGTHS[name][:2]]
        q, k, v, dout = (torch.randn(200, 2, headdim, device="cuda", dtype=torch.float16) for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with kernels_of(arch):
            out = flash_attn_varlen_func(
                *leaves, *lengths, 100, 100, causal=True, deterministic=deterministic, backend="cuda"
            )
            torch.autograd.grad(out, leaves, dout)
    torch.cuda.synchronize()


def run_wrong_cache_values(cases: Iterable[KvCacheCase]) -> None:
    """Runs calls whose last sequence has a wrong length, cache row, left padding or page."""
    arguments = ("lengths", "cache_batch_idx", "cache_leftpad", "block_table")
    for case, value, argument in itertools.product(cases, HOSTILE[:3], arguments):
        for arch in archs_of(case):
            call = make_call(case, torch.float16, "cuda", seed=0)
            tensor = getattr(call, argument)
            if isinstance(tensor, Tensor):
                tensor[-1] = value
                with kernels_of(arch):
                    run_call(call, "cuda")
    torch.cuda.synchronize()


def run_minimal() -> None:
    """Runs the kernels of learn/csrc: ragged lengths, and rows without a key."""
    from learn import minimal_cuda_attention, tensor_core_attention

    for seqlen_q, seqlen_k, headdim in ((130, 70, 64), (65, 129, 128)):
        q, k, v = (torch.randn(1, 2, s, headdim, device="cuda") for s in (seqlen_q, seqlen_k, seqlen_k))
        minimal_cuda_attention(q, k, v, causal=True)
        tensor_core_attention(q.half(), k.half(), v.half(), causal=True)
    torch.cuda.synchronize()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("headdims", nargs="*", type=int, help="default: all")
    parser.add_argument("--per-headdim", type=int, help="most cases of each head dim, mask and feature")
    parser.add_argument("--of", choices=list(CASES), help="default: all")
    parser.add_argument("--part", nargs=2, type=int, default=(0, 1), metavar=("K", "N"), help="every Nth case, from K")
    parser.add_argument("--wrong-values", action="store_true", help="also lengths, rows and pages out of range")
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=sorted(DTYPES))
    return parser


def main(argv: list[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    part, parts = arguments.part
    if not 0 <= part < parts:
        parser().error(f"--part is {part} {parts}; allowed: K N with 0 <= K < N")
    # Without PyTorch's pool every tensor is its own allocation, so memcheck knows its bounds.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    cases = choose(arguments.headdims, arguments.per_headdim, arguments.of)[part::parts]
    start = time.monotonic()
    for dtype in arguments.dtypes:
        for case in cases:
            run(case, DTYPES[dtype])
    is_of_attention, is_of_kvcache = (arguments.of in (None, of) for of in CASES)
    if is_of_attention and part == 0:
        run_minimal()
    if arguments.wrong_values and is_of_attention:
        run_wrong_lengths(list(WRONG_LENGTHS)[part::parts])
    if arguments.wrong_values and is_of_kvcache:
        run_wrong_cache_values([case for case in cases if isinstance(case, KvCacheCase)])
    print(f"ran {len(cases)} cases in {', '.join(arguments.dtypes)}: {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
