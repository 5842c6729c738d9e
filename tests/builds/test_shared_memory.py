"""The tiles of sm80 against the shared memory of the GPUs that run them. csrc/sm90 has static asserts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from build_tools import kernels, selection
from third_party.fetch_cutlass import CutlassError, cutlass_include_dir

# Bytes that a thread block may have, by compute capability: CUDA C++ Programming Guide, "Technical Specifications".
LIMITS = {80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int, str, list[int]]]:
    """Kernel, head dim, kind and bytes of every tile."""
    try:
        nvcc, cutlass = kernels.cuda_home() / "bin" / "nvcc", cutlass_include_dir()
    except (SystemExit, CutlassError) as error:
        pytest.skip(f"needs the CUDA toolkit and CUTLASS: {error}")
    source, program = Path(__file__).with_name("shared_memory.cu"), tmp_path_factory.mktemp("tiles") / "tiles"
    flags = ["-std=c++17", "--expt-relaxed-constexpr", "-arch=sm_80", f"-I{kernels.CSRC}", f"-I{cutlass}"]
    compiled = subprocess.run([nvcc, *flags, source, "-o", program], capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stdout + compiled.stderr
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in printed.splitlines()]
    return [(kernel, int(hdim), kind, [int(x) for x in sizes]) for kernel, hdim, kind, *sizes in rows]


@pytest.mark.slow
@pytest.mark.thorough  # compiles the tiles of every kernel
def test_every_gpu_has_tiles_that_fit(tiles: list[tuple[str, int, str, list[int]]]) -> None:
    """The forward has one tile, the backward a small one as well; splitkv ends with 64 rows."""
    assert {hdim for _, hdim, _, _ in tiles} == {0, *selection.ALL_HDIMS}
    for capability, limit in LIMITS.items():
        for kernel, hdim, kind, sizes in tiles:
            if kernel != "limit":
                assert min(sizes) <= limit, f"{kernel}, head dim {hdim}, {kind} on {capability}"


@pytest.mark.slow
@pytest.mark.thorough
def test_a_tile_that_some_gpu_lacks_memory_for_is_chosen_at_run_time(
    tiles: list[tuple[str, int, str, list[int]]],
) -> None:
    """choose_tile compares only tiles beyond kMinDeviceSmem with the GPU; this is what every GPU has."""
    ((_, _, _, (smallest,)),) = (tile for tile in tiles if tile[0] == "limit")
    assert smallest == min(LIMITS.values())
    large = [sizes for kernel, _, _, sizes in tiles if kernel == "backward" and sizes[0] > smallest]
    assert large, "no tile of the backward needs more than the smallest GPU has"
