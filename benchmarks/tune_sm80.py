"""Finds tile sizes for the sm80 forward: compiles candidates on any machine, times them on a GPU.

`python -m benchmarks.tune_sm80 compile DIR` needs nvcc only; `python -m benchmarks.tune_sm80 run DIR` needs a GPU and
prints TFLOP/s and the ratio to PyTorch's FLASH_ATTENTION of each candidate, interleaved in one run.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# head dim -> (kBlockM, kBlockN, kNWarps, kMinBlocksPerSM, kSpares_registers, kQ_steps_in_registers)
CANDIDATES: dict[int, list[tuple[int, int, int, int, int, int]]] = {
    32: [(128, 128, 4, 2, 0, 0), (128, 64, 4, 3, 0, 0), (128, 64, 4, 4, 1, 0)],
    64: [(128, 128, 4, 2, 0, 0), (128, 112, 4, 2, 0, 0), (128, 96, 4, 2, 0, 0), (128, 64, 4, 2, 0, 4)],
    96: [(128, 64, 4, 2, 0, 0), (128, 64, 4, 2, 1, 0)],
    128: [(128, 64, 4, 2, 0, 0), (128, 64, 4, 2, 1, 0), (128, 32, 4, 2, 0, 0), (128, 128, 8, 1, 0, 0)],
    192: [(64, 64, 4, 2, 0, 12), (64, 80, 4, 2, 0, 8), (64, 64, 4, 2, 0, 0), (128, 64, 8, 1, 0, 0)],
    256: [(64, 64, 4, 2, 0, 8), (64, 64, 4, 2, 0, 6), (64, 64, 4, 2, 0, 0), (128, 64, 8, 1, 0, 0)],
}
TEMPLATE = """
#include "sm80/flash_fwd_launch_template.h"
using namespace flash;
using namespace flash::sm80;
extern "C" int tune_run(int candidate, void *q, void *k, void *v, void *o, void *lse, int b, int s, int h, int d,
                        int causal, cudaStream_t stream) {
    Flash_fwd_params p;
    TensorRef like{nullptr, int64_t(s) * h * d, int64_t(h) * d, d};
    p.q = p.k = p.v = p.o = like;
    p.q.ptr = q; p.k.ptr = k; p.v.ptr = v; p.o.ptr = o; p.softmax_lse = lse;
    p.b = b; p.h = p.h_k = h; p.seqlen_q = p.seqlen_k = s; p.d = d; p.is_causal = causal;
    p.softmax_scale = 1 / sqrt(double(d)); p.scale_softmax_log2 = p.softmax_scale * M_LOG2E;
    try {
        switch (candidate) {
%s
        }
        return 0;
    } catch (std::exception &error) { fprintf(stderr, "%%s\\n", error.what()); return 1; }
}
"""
CASE = """            case {i}: causal ? launch_flash_fwd<DType::bfloat16, {hdim}, true, Tile_fwd<{tile}>>(p, stream)
                           : launch_flash_fwd<DType::bfloat16, {hdim}, false, Tile_fwd<{tile}>>(p, stream); break;"""


def compile_candidates(folder: Path, arch: str, csrc: Path, hdims: list[int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for hdim in hdims:
        tiles = CANDIDATES[hdim]
        cases = "\n".join(CASE.format(i=i, hdim=hdim, tile=", ".join(map(str, tile))) for i, tile in enumerate(tiles))
        source = folder / f"tune_{hdim}.cu"
        source.write_text(TEMPLATE % cases)
        command = ["nvcc", "-shared", "-O3", "-std=c++17", "--expt-relaxed-constexpr", "--expt-extended-lambda"]
        command += ["-Xcompiler=-fPIC", "-Xptxas=-v", "-DNDEBUG", f"-gencode=arch=compute_{arch},code=sm_{arch}"]
        command += [f"-I{csrc}", f"-I{ROOT / 'third_party/cutlass/include'}", "-cudart=shared"]
        command += [str(source), "-o", str(folder / f"tune_{hdim}.so")]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        (folder / f"tune_{hdim}.ptxas.txt").write_text(result.stdout)
        print(
            hdim,
            "spilling kernels:",
            sum("spill stores" in line and " 0 bytes spill stores" not in line for line in result.stdout.splitlines()),
            flush=True,
        )
        if result.returncode:
            sys.exit(result.stdout[-3000:])


def run_candidates(folders: list[Path], seqlens: list[int], hdims: list[int]) -> None:
    import torch
    import torch.nn.functional as F
    from tabulate import tabulate
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from triton.testing import do_bench

    for hdim in hdims:
        rows = []
        libraries = {folder.name: ctypes.CDLL(str(folder / f"tune_{hdim}.so")) for folder in folders}
        for seqlen in seqlens:
            batch, heads = 16384 // seqlen, 2048 // hdim
            q, k, v = (torch.randn(batch, seqlen, heads, hdim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            lse = torch.empty(batch, heads, seqlen, device="cuda")
            for causal in (False, True):
                flop = 4 * batch * heads * seqlen * seqlen * hdim * (0.5 if causal else 1.0)

                def flash(causal: bool = causal) -> torch.Tensor:
                    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                        return F.scaled_dot_product_attention(
                            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal
                        ).transpose(1, 2)

                expected = flash()
                runs = {"PyTorch FLASH": flash}
                for name, library in libraries.items():
                    for i, tile in enumerate(CANDIDATES[hdim]):
                        out = torch.full_like(q, float("nan"))

                        def ours(library=library, i=i, out=out, causal=causal):  # type: ignore[no-untyped-def]
                            pointers = [ctypes.c_void_p(t.data_ptr()) for t in (q, k, v, out, lse)]
                            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
                            return library.tune_run(i, *pointers, batch, seqlen, heads, hdim, int(causal), stream)

                        if ours():
                            continue
                        torch.cuda.synchronize()
                        error = (out.float() - expected.float()).abs().max().item()
                        if not error < 0.05:
                            print("WRONG", name, hdim, tile, seqlen, causal, error)
                            continue
                        runs[f"{name} {'x'.join(map(str, tile))}"] = ours
                times: dict[str, list[float]] = {run: [] for run in runs}
                for _ in range(2):
                    for run, function in runs.items():
                        times[run].append(do_bench(function, warmup=5, rep=30, return_mode="median"))
                base = min(times["PyTorch FLASH"])
                for run, found in sorted(times.items(), key=lambda item: min(item[1])):
                    rows.append([hdim, seqlen, causal, run, flop / min(found) / 1e9, base / min(found)])
        print(tabulate(rows, headers=["d", "S", "causal", "candidate", "TFLOP/s", "ratio"], floatfmt=".2f"), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["compile", "run"])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--arch", default="90a")
    parser.add_argument("--csrc", type=Path, default=ROOT / "csrc")
    parser.add_argument("--seqlens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--hdims", type=int, nargs="+", default=list(CANDIDATES))
    arguments = parser.parse_args()
    if arguments.action == "compile":
        compile_candidates(arguments.folders[0], arguments.arch, arguments.csrc, arguments.hdims)
    else:
        run_candidates(arguments.folders, arguments.seqlens, arguments.hdims)


if __name__ == "__main__":
    main()
