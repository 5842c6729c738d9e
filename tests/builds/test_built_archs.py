"""Which GPUs a build runs on, and which kernels it has: dispatch/built.h, compiled on the host for several builds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from build_tools import kernels, selection

CSRC = Path(__file__).resolve().parents[2] / "csrc"

# FLASH_ARCHS, FLASH_ARCHS_EXACT (None: not defined), the compute capabilities that run it, those that do not
BUILDS = [
    ("80,90", "90", ["8,0", "8,6", "8,9", "9,0"], ["7,5", "9,1", "10,0", "12,0"]),
    ("100", "100", ["10,0"], ["10,3", "10,1", "9,0", "11,0"]),
    ("100", "", ["10,0", "10,3"], ["9,0", "12,0"]),
    ("86,120", None, ["8,6", "8,9", "12,0", "12,1"], ["8,0", "10,0"]),
    ("80,103", "103", ["8,6", "10,3"], ["10,0", "10,4"]),
    ("80,90,120", "90", ["8,9", "9,0", "12,0", "12,1"], ["10,0", "11,0"]),
]


@pytest.mark.parametrize(("archs", "exact", "runs", "runs_not"), BUILDS)
def test_a_build_runs_on_its_architectures(
    archs: str, exact: str | None, runs: list[str], runs_not: list[str], tmp_path: Path
) -> None:
    """An 'a' build runs only on its own compute capability; any other also on later minor versions."""
    lines = [f"static_assert(flash::runs_on({one}));" for one in runs]
    lines += [f"static_assert(!flash::runs_on({one}));" for one in runs_not]
    compile_on_host(lines, archs, exact, [], tmp_path)


def compile_on_host(lines: list[str], archs: str, exact: str | None, more: list[str], folder: Path) -> None:
    """Compiles the lines behind csrc/dispatch/built.h."""
    source = folder / "archs.cpp"
    source.write_text("\n".join(['#include "dispatch/built.h"', "using flash::Kind;", *lines, ""]))
    defines = ["-DFLASH_WITH_CUDA", f"-DFLASH_ARCHS={archs}", "-DFLASH_HDIMS=64", "-DFLASH_DTYPES=", *more]
    defines += [] if exact is None else [f"-DFLASH_ARCHS_EXACT={exact}"]
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{CSRC}", *defines, str(source)]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr


SELECTIONS = [
    ("90a",),
    ("80", "90a"),
    ("90", "90a"),
    ("80", "90", "90a"),
    ("80",),
    ("90",),
    ("100a", "90a"),
    ("80", "90a", "120"),
    ("120",),
]


@pytest.mark.parametrize("archs", SELECTIONS, ids=";".join)
@pytest.mark.parametrize("headdim", [32, 64])
def test_a_build_calls_the_kernels_that_it_compiles_and_no_other(
    headdim: int, archs: tuple[str, ...], tmp_path: Path
) -> None:
    """The conditions in C++ against the objects that build_tools/kernels.py lists."""
    chosen = selection.Selection(archs, (headdim,), ("bf16",))
    objects = {kernel.name: kernel.archs for kernel in kernels.kernel_objects(chosen)}
    name, kinds = f"hdim{headdim}_bf16", kernels.read_kinds()
    lines = []
    for kind in kinds.all:
        own = (
            f"_{kind}" if kind in ("ranged", "paged", "split", "biased") else ""
        )  # the forward has an object of its own
        sm80_fwd = objects.get(f"flash_fwd_{name}{own}_sm80")
        sm80_bwd = objects.get(f"flash_bwd_{name}_{kind}_sm80")
        has_sm90_fwd = kind in kinds.forward_sm90 and f"flash_fwd_{name}{own}_sm90" in objects
        for function, is_compiled in (
            ("has_sm80_fwd", sm80_fwd is not None),
            ("has_sm80_bwd", sm80_bwd is not None),
            ("has_sm90_fwd", has_sm90_fwd),
            ("has_sm90_bwd", f"flash_bwd_{name}_{kind}_sm90" in objects),
        ):
            lines.append(f"static_assert({'' if is_compiled else '!'}flash::{function}({headdim}, Kind::{kind}));")
        if has_sm90_fwd and kind != "split":
            is_on_hopper = sm80_fwd is not None and "90" in sm80_fwd
            lines.append(f"static_assert({'' if is_on_hopper else '!'}flash::kHasSm80OnHopper);")
    more = ["-DFLASH_WITH_SM90"] * chosen.has_sm90
    lists = (",".join(map(str, numbers)) for numbers in (chosen.capabilities, chosen.exact_capabilities))
    compile_on_host(lines, *lists, more, tmp_path)
