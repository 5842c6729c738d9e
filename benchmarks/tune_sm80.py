"""Compares tile sizes of the sm80 kernels: compiles candidates on any machine, times them on a GPU.

  python -m benchmarks.tune_sm80 compile DIR              needs nvcc only
  python -m benchmarks.tune_sm80 run DIR                  needs a GPU
  python -m benchmarks.tune_sm80 run DIR --backward       the backward; compile takes --backward too

`compile` prints registers and spills of each candidate, `run` TFLOP/s and the ratio to PyTorch's FLASH_ATTENTION,
interleaved in one run. Several folders, compiled with --csrc from several checkouts, compare in one run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import re
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.bench_build import fields_of, parse, readable
from benchmarks.methods import BACKWARD_WORK, attention_flops, check_agreement, interleave, ratio, time_cuda
from benchmarks.rivals import BACKWARD_RIVALS, RIVALS, Call, Rival, upstream_gradient
from build_tools.kernels import CSRC, NVCC_FLAGS, cuda_home
from build_tools.selection import max_jobs
from third_party.fetch_cutlass import cutlass_include_dir

TOKENS, COLUMNS = 16384, 2048  # batch * seqlen, nheads * headdim
ROWS_ROUNDED = 128  # Flash_bwd_params::kRowsRounded
SEQLENS = (1024, 4096)
RIVAL = "FLASH_ATTENTION"

# Candidates in addition to the tiles in csrc/sm80: arguments of TileFwd and TileBwd; trailing defaults may be left out.
FORWARD_TILES: dict[int, list[tuple[int, ...]]] = {
    32: [(128, 128, 4, 2), (128, 64, 4, 3), (128, 64, 4, 4, 1)],
    64: [(128, 128, 4, 2), (128, 112, 4, 2), (128, 96, 4, 2), (128, 64, 4, 2, 0, 4)],
    96: [(128, 64, 4, 2), (128, 64, 4, 2, 1)],
    128: [(128, 64, 4, 2), (128, 64, 4, 2, 1), (128, 32, 4, 2), (128, 128, 8, 1)],
    192: [(64, 64, 4, 2, 0, 12), (64, 80, 4, 2, 0, 8), (64, 64, 4, 2), (128, 64, 8, 1)],
    256: [(64, 64, 4, 2, 0, 8), (64, 64, 4, 2, 0, 6), (64, 64, 4, 2), (128, 64, 8, 1)],
}
BACKWARD_TILES: dict[int, list[tuple[int, ...]]] = {
    32: [(64, 128, 4, 4, 4, 2, 2, 2, 1, 2), (64, 128, 4, 4, 4, 2, 2, 3, 1, 2, 1)],
    64: [(64, 128, 4, 4, 4, 2, 2, 2, 1, 2), (64, 128, 4, 4, 4, 2, 2, 2, 0, 2, 1), (64, 128, 8, 4, 4, 4, 2, 1, 1)],
    96: [(64, 64, 4, 2, 2, 2, 1, 2, 1), (64, 64, 4, 2, 2, 4, 2, 2, 0), (64, 128, 8, 4, 4, 4, 2, 1, 1)],
    128: [
        (64, 128, 8, 4, 4, 2, 2, 1, 1),
        (64, 128, 8, 4, 4, 2, 2, 1, 0),
        (64, 128, 8, 4, 4, 4, 2, 1, 1, 1, 0, 1),
        (64, 64, 4, 2, 2, 2, 1, 2, 0),
        (64, 64, 4, 2, 2, 2, 1, 2, 1),
    ],
    192: [(64, 64, 8, 2, 2, 2, 2, 1, 1, 1, 0, 1), (64, 64, 8, 2, 2, 2, 2, 1, 0), (64, 64, 8, 4, 2, 2, 2, 1, 1)],
    256: [(64, 64, 8, 2, 2, 4, 2, 1, 0), (64, 64, 8, 4, 2, 2, 2, 1, 0), (64, 64, 8, 2, 2, 2, 1, 1, 1, 1, 0, 1)],
}

SHAPE = """
    TensorRef like{nullptr, int64_t(s) * h * d, int64_t(h) * d, d};
    p.q = p.k = p.v = p.o = like;
    p.q.ptr = q; p.k.ptr = k; p.v.ptr = v; p.o.ptr = o; p.softmax_lse = lse;
    p.dtype = DType::bfloat16; p.b = b; p.h = p.h_k = h; p.seqlen_q = p.seqlen_k = s; p.d = d;
    p.lse_batch_stride = int64_t(h) * s; p.lse_head_stride = s;
    p.is_causal = causal; p.window_size_right = causal ? 0 : -1;
    p.softmax_scale = 1 / sqrt(double(d)); p.qk_scale = p.scale_softmax = p.softmax_scale;
    p.scale_softmax_log2 = p.softmax_scale * kLog2e;
"""
ATTEMPT = """
using namespace flash;
using namespace flash::sm80;
template <typename Launch, typename Params>
static int attempt(Launch launch, const Params &params, cudaStream_t stream) {
    try {
        launch(params, stream);
        return 0;
    } catch (std::exception &error) {
        cudaGetLastError();  // clears the error for the next launch
        fprintf(stderr, "%s\\n", error.what());
        return 1;
    }
}
"""
FORWARD_SOURCE = """
#include "sm80/forward/flash_fwd_launch_template.h"
$attempt
extern "C" int tune_run(void *q, void *k, void *v, void *o, void *lse, int b, int s, int h, int d, int causal,
                         cudaStream_t stream) {
    Flash_fwd_params p;
$shape
    return attempt(causal ? launch_flash_fwd<DType::bfloat16, $hdim, Kind::local, TileFwd<$tile>>
                          : launch_flash_fwd<DType::bfloat16, $hdim, Kind::full, TileFwd<$tile>>, p, stream);
}
"""
BACKWARD_SOURCE = """
#include "sm80/backward/flash_bwd_launch_template.h"
$attempt
constexpr bool kHasBulkReduce = $has_bulk_reduce;
template <BwdMode kMode>
static int run(const Flash_bwd_params &params, cudaStream_t stream) {
    using Tile = TileBwd<$tile>;
    return attempt(
        params.is_causal ? launch_flash_bwd<DType::bfloat16, $hdim, Kind::local, Tile, kHasBulkReduce, kMode>
                         : launch_flash_bwd<DType::bfloat16, $hdim, Kind::full, Tile, kHasBulkReduce, kMode>,
        params, stream);
}
extern "C" int tune_run(void *q, void *k, void *v, void *o, void *lse, void *dout, void *dq, void *dk, void *dv,
                         void *delta, void *lse_padded, void *large_rows, void *dq_accum, void *dq_semaphore,
                         int b, int s, int h, int d, int causal, cudaStream_t stream) {
    Flash_bwd_params p;
$shape
    p.dout = p.dq = p.dk = p.dv = like;
    p.dout.ptr = dout; p.dq.ptr = dq; p.dk.ptr = dk; p.dv.ptr = dv;
    p.dsoftmax_sum = delta; p.lse_padded = static_cast<float *>(lse_padded);
    p.large_rows = static_cast<int *>(large_rows);
    p.dq_accum = static_cast<float *>(dq_accum); p.d_rounded = $hdim;
    p.padded_head_stride = (s + p.kRowsRounded - 1) / p.kRowsRounded * p.kRowsRounded;
    p.padded_batch_stride = h * p.padded_head_stride;
    p.has_bulk_reduce = kHasBulkReduce;
    if (dq_semaphore == nullptr) {
        return run<BwdMode::all>(p, stream);
    }
    const int64_t semaphores = padded_rows(p) / p.kRowsPerSemaphore;
    p.deterministic = true;
    p.dq_semaphore = static_cast<int *>(dq_semaphore);
    p.dq_tile_counter = p.dq_semaphore + semaphores;
    cudaMemsetAsync(dq_semaphore, 0, (semaphores + 1) * sizeof(int), stream);
    return run<BwdMode::deterministic>(p, stream);
}
"""


@dataclass(frozen=True)
class Candidate:
    """One tile configuration of one head dim."""

    hdim: int
    tile: tuple[int, ...]
    backward: bool

    @property
    def name(self) -> str:
        return "x".join(map(str, self.tile))

    def library(self, folder: Path) -> Path:
        return folder / f"tune_{'bwd' if self.backward else 'fwd'}_{self.hdim}_{self.name}.so"

    def source(self, arch: str) -> str:
        """`arch` as nvcc writes it after sm_, 90a for one."""
        template = Template(BACKWARD_SOURCE if self.backward else FORWARD_SOURCE)
        return template.substitute(
            hdim=self.hdim,
            tile=", ".join(map(str, self.tile)),
            attempt=ATTEMPT,
            shape=SHAPE,
            has_bulk_reduce="true" if int(arch.rstrip("af")) >= 90 else "false",
        )


def kept_tiles(csrc: Path, hdim: int, backward: bool) -> list[tuple[int, ...]]:
    """The tiles of a head dim in the kernels' own tables; several where kinds, modes or sizes of GPU differ."""
    header = csrc / "sm80" / ("backward/kernel_traits_bwd.h" if backward else "forward/kernel_traits.h")
    entry = re.compile(rf"struct TileSizes\w+<{hdim}\b[^>]*>\s*: Tile\w+<([^>]+)>")
    number = {"true": 1, "false": 0}
    return [
        tuple(number[x] if x in number else int(x) for x in re.split(r",\s*", arguments))
        for arguments in entry.findall(header.read_text(encoding="utf-8"))
    ]


def choose(csrc: Path, hdims: list[int], backward: bool, asked: list[tuple[int, ...]]) -> list[Candidate]:
    """The kept tiles of each head dim, then those asked for, or else those listed here."""
    listed = BACKWARD_TILES if backward else FORWARD_TILES
    return [
        Candidate(hdim, tile, backward)
        for hdim in hdims
        for tile in dict.fromkeys([*kept_tiles(csrc, hdim, backward), *(asked or listed[hdim])])
    ]


def compile_candidate(candidate: Candidate, folder: Path, arch: str, csrc: Path) -> str:
    """Compiles one candidate; returns one line about its registers, or its error."""
    library = candidate.library(folder)
    source = library.with_suffix(".cu")
    source.write_text(candidate.source(arch))
    command = [str(cuda_home() / "bin/nvcc"), "-shared", *NVCC_FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}"]
    command += ["-cudart=shared", f"-I{csrc}", f"-I{cutlass_include_dir()}", str(source), "-o", str(library)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    library.with_suffix(".ptxas.txt").write_text(result.stdout)
    if result.returncode:
        errors = [line for line in result.stdout.splitlines() if "error" in line] or [result.stdout[-500:]]
        return f"d{candidate.hdim} {candidate.name}: does not compile: {errors[0]}"
    return f"d{candidate.hdim} {candidate.name}: {'; '.join(registers_and_spills(result.stdout, arch))}"


def registers_and_spills(report: str, arch: str) -> list[str]:
    """One phrase for each attention kernel in the output of ptxas -v."""
    found = []
    rows = parse(report)
    for row, name in zip(rows, readable([row["kernel"] for row in rows]), strict=True):
        text = f"{row['registers']} registers, {row['spill_bytes']} bytes spilled"
        kernel = fields_of(name, arch) or {}
        what = [kernel[key] for key in ("mode", "kind") if key in kernel]
        if what:
            text = f"{', '.join(what)}: {text}"
        if "mode" in kernel or "flash_bwd" not in name:  # leaves out preprocessing, conversion and empty kernels
            found.append(text)
    return sorted(found)


class Tuned(Rival):
    """A compiled candidate."""

    def __init__(self, candidate: Candidate, folder: Path, label: str, deterministic: bool) -> None:
        self.name = label
        self.backward = candidate.backward
        self.deterministic = deterministic
        self.library = ctypes.CDLL(str(candidate.library(folder)))

    def bind(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        batch, seqlen, nheads, headdim = q.shape
        sizes = (batch, seqlen, nheads, headdim, int(causal))
        if not self.backward:
            out, lse = torch.full_like(q, float("nan")), q.new_empty((batch, nheads, seqlen), dtype=torch.float32)
            return partial(self.run, [q, k, v, out, lse], sizes, [out])
        inputs = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*inputs, 0.0, causal)
        rows = batch * nheads * (-(-seqlen // ROWS_ROUNDED) * ROWS_ROUNDED)
        gradients = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        delta, lse_padded = (q.new_empty(rows, dtype=torch.float32) for _ in range(2))
        large_rows = q.new_empty(rows, dtype=torch.int32)  # more than enough, as are the semaphores
        dq_accum = q.new_empty(rows * headdim, dtype=torch.float32)
        semaphore = q.new_empty(rows + 1, dtype=torch.int32) if self.deterministic else None  # and the tile counter
        tensors = [q, k, v, out.transpose(1, 2).contiguous(), lse, upstream_gradient(q), *gradients]
        return partial(self.run, [*tensors, delta, lse_padded, large_rows, dq_accum, semaphore], sizes, gradients)

    def run(self, tensors: list[Tensor | None], sizes: tuple[int, ...], outputs: list[Tensor]) -> list[Tensor]:
        pointers = [ctypes.c_void_p(x.data_ptr() if x is not None else None) for x in tensors]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if self.library.tune_run(*pointers, *sizes, stream) != 0:
            raise RuntimeError(f"{self.name} does not run")
        return outputs

    def outputs(self, result: Any) -> tuple[Tensor, ...]:
        return tuple(result)


def agrees(tuned: Tuned, call: Call, flash: Rival, flash_call: Call) -> bool:
    try:
        check_agreement([tuned, flash], {tuned: call, flash: flash_call})
    except RuntimeError as error:
        print(f"left out: {error}")
        return False
    return True


def run_candidates(candidates: list[Candidate], folders: list[Path], deterministic: bool) -> list[list[Any]]:
    """[head dim, length, causal, name, TFLOP/s, ratio to FLASH_ATTENTION] of each, best first at each shape."""
    rows = []
    backward = candidates[0].backward
    flash = (BACKWARD_RIVALS if backward else RIVALS)[RIVAL]
    for hdim in dict.fromkeys(candidate.hdim for candidate in candidates):
        tuned = [
            Tuned(c, folder, f"{folder.name}/{c.name}" if len(folders) > 1 else c.name, deterministic)
            for folder in folders
            for c in candidates
            if c.hdim == hdim and c.library(folder).exists()
        ]
        for seqlen in SEQLENS:
            shape = (TOKENS // seqlen, seqlen, COLUMNS // hdim, hdim)
            q, k, v = (torch.randn(shape, device="cuda").to(torch.bfloat16) for _ in range(3))
            for causal in (False, True):
                flops = attention_flops(shape[0], shape[2], seqlen, seqlen, hdim, causal)
                flops *= BACKWARD_WORK if backward else 1.0
                calls: dict[Rival, Call] = {flash: flash.bind(q, k, v, causal)}
                for contender in tuned:
                    call = contender.bind(q, k, v, causal)
                    if agrees(contender, call, flash, calls[flash]):
                        calls[contender] = call
                timings = interleave(calls, time_cuda, rounds=2, rep_ms=30.0 * (BACKWARD_WORK if backward else 1.0))
                found: list[list[Any]] = [
                    [hdim, seqlen, causal, name, flops / timing.ms / 1e9, ratio(timing, timings[RIVAL])]
                    for name, timing in timings.items()
                ]
                rows += sorted(found, key=lambda row: -row[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["compile", "run"])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--deterministic", action="store_true", help="time the backward's deterministic variant")
    parser.add_argument("--arch", default="90a")
    parser.add_argument("--csrc", type=Path, default=CSRC)
    parser.add_argument("--hdims", type=int, nargs="+", default=sorted(FORWARD_TILES))
    parser.add_argument("--tiles", nargs="+", help="such as 64x64x4x2, in place of the listed ones")
    arguments = parser.parse_args()
    asked = [tuple(map(int, tile.split("x"))) for tile in arguments.tiles or ()]
    candidates = choose(arguments.csrc, arguments.hdims, arguments.backward, asked)
    if arguments.action == "compile":
        folder = arguments.folders[0].resolve()
        folder.mkdir(parents=True, exist_ok=True)
        build = partial(compile_candidate, folder=folder, arch=arguments.arch, csrc=arguments.csrc.resolve())
        with concurrent.futures.ThreadPoolExecutor(max_jobs()) as pool:
            for line in pool.map(build, reversed(candidates)):  # large head dims take longest
                print(line, flush=True)
    else:
        folders = [folder.resolve() for folder in arguments.folders]
        for hdim in arguments.hdims:
            of_hdim = [candidate for candidate in candidates if candidate.hdim == hdim]
            rows = run_candidates(of_hdim, folders, arguments.deterministic)
            headers = ["d", "S", "causal", "candidate", "TFLOP/s", "ratio"]
            print(tabulate(rows, headers=headers, floatfmt=".2f"), flush=True)


if __name__ == "__main__":
    main()
