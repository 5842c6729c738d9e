"""What to build: the extension or not; GPU architectures, head dims and dtypes. From the environment or the machine.

FLASH_ATTN_MINI_ARCHS, FLASH_ATTN_MINI_HDIMS and FLASH_ATTN_MINI_DTYPES are lists separated by ';' or ','.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

ALL_HDIMS = (32, 64, 96, 128, 192, 256)
ALL_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}  # the name in the environment -> flash::DType
DEFAULT_ARCHS = ("80", "90a")  # on a machine without a GPU
OLDEST_ARCH = 80

GIB = 1 << 30
MEMORY_PER_JOB = 3 * GIB  # an sm80 kernel file of head dim 256 needs up to 2 GiB


@dataclass(frozen=True)
class Selection:
    """Which CUDA kernels a build holds; no architecture means the CPU backend only."""

    archs: tuple[str, ...]  # "80", "90a", ... as nvcc writes them after sm_
    hdims: tuple[int, ...]
    dtypes: tuple[str, ...]  # keys of ALL_DTYPES

    @property
    def has_sm90(self) -> bool:
        """Whether the kernels of csrc/sm90 are built, which need Hopper's own instructions."""
        return "90a" in self.archs

    @property
    def archs_beside_sm90(self) -> tuple[str, ...]:
        """Those that get the kernels of csrc/sm80 for calls that have a kernel in csrc/sm90: all but "90a"."""
        return tuple(arch for arch in self.archs if arch != "90a")

    @property
    def archs_of_others(self) -> tuple[str, ...]:
        """Those that get all other kernels: "90" holds the code of "90a" too."""
        return self.archs_beside_sm90 if "90" in self.archs else self.archs

    @property
    def capabilities(self) -> tuple[int, ...]:
        """The architectures as compute capabilities: 90 for "90a"."""
        return tuple(dict.fromkeys(int(arch.rstrip("af")) for arch in self.archs))

    @property
    def exact_capabilities(self) -> tuple[int, ...]:
        """Those compiled only with 'a': such code runs on its own capability and on no later minor version."""
        return tuple(int(arch[:-1]) for arch in self.archs if arch[-1] == "a" and arch[:-1] not in self.archs)


def _items(variable: str) -> list[str]:
    return [item for item in re.split(r"[;,\s]+", os.environ.get(variable, "")) if item]


def _invalid(variable: str, item: str, allowed: str) -> SystemExit:
    return SystemExit(f"{variable} holds {item!r}; allowed: {allowed}, separated by ';'")


def host_compiler() -> str | None:
    """The C++ compiler: CXX, else c++ or g++ on PATH; None where there is none.

    Raises:
        SystemExit: If CXX names a program that does not exist.
    """
    named = os.environ.get("CXX")
    if named:
        if shutil.which(named.split()[0]) is None:
            raise SystemExit(f"CXX is {named!r}, which does not exist; allowed: a C++ compiler, or CXX unset")
        return named
    return next((name for name in ("c++", "g++") if shutil.which(name)), None)


def wants_extension() -> bool:
    """Whether to build flash_attn_mini._C: FLASH_ATTN_MINI_EXTENSION, else whether there is a C++ compiler.

    Raises:
        SystemExit: If the extension is asked for and there is no compiler.
    """
    variable = "FLASH_ATTN_MINI_EXTENSION"
    asked = os.environ.get(variable, "")
    if asked not in ("", "0", "1"):
        raise SystemExit(f"{variable} is {asked!r}; allowed: 0, 1, or {variable} unset")
    if asked == "0":
        return False
    if asked == "1" and host_compiler() is None:
        raise SystemExit(f"{variable} is '1', but there is no C++ compiler: install g++, or set CXX")
    return host_compiler() is not None


def asked_archs() -> tuple[str, ...] | None:
    """The architectures in FLASH_ATTN_MINI_ARCHS, () for none; None where it is not set."""
    variable = "FLASH_ATTN_MINI_ARCHS"
    items = _items(variable)
    if items == ["none"]:
        return ()
    for item in items:
        if not re.fullmatch(r"\d{2,3}[af]?", item) or int(item.rstrip("af")) < OLDEST_ARCH:
            raise _invalid(variable, item, "none, or compute capabilities from 80 up, such as 80, 86, 89, 90a, 120")
    return tuple(dict.fromkeys(items)) or None


def select_archs() -> tuple[str, ...]:
    """The architectures in FLASH_ATTN_MINI_ARCHS, else those of the GPUs present, else DEFAULT_ARCHS."""
    asked = asked_archs()
    return (_archs_of_gpus_present() or DEFAULT_ARCHS) if asked is None else asked


def _archs_of_gpus_present() -> tuple[str, ...]:
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    capabilities = sorted({line.strip().replace(".", "") for line in answer.stdout.splitlines() if line.strip()})
    archs = [c for c in capabilities if c.isdigit() and int(c) >= OLDEST_ARCH]
    return tuple("90a" if arch == "90" else arch for arch in archs)


def select_hdims() -> tuple[int, ...]:
    """The head dims in FLASH_ATTN_MINI_HDIMS, else all."""
    variable = "FLASH_ATTN_MINI_HDIMS"
    items = _items(variable)
    for item in items:
        if item not in map(str, ALL_HDIMS):
            raise _invalid(variable, item, ", ".join(map(str, ALL_HDIMS)))
    return tuple(sorted({int(item) for item in items})) or ALL_HDIMS


def select_dtypes() -> tuple[str, ...]:
    """The dtypes in FLASH_ATTN_MINI_DTYPES, else all."""
    variable = "FLASH_ATTN_MINI_DTYPES"
    items = _items(variable)
    for item in items:
        if item not in ALL_DTYPES:
            raise _invalid(variable, item, ", ".join(ALL_DTYPES))
    return tuple(dict.fromkeys(items)) or tuple(ALL_DTYPES)


def max_jobs() -> int:
    """MAX_JOBS when set, else the number of compiler processes that cores and free memory allow."""
    asked = os.environ.get("MAX_JOBS")
    if asked is not None:
        if not re.fullmatch(r"0*[1-9][0-9]*", asked):
            raise SystemExit(f"MAX_JOBS is {asked!r}; allowed: a whole number from 1 up, or MAX_JOBS unset")
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _free_memory() // MEMORY_PER_JOB))


def _free_memory() -> int:
    """Bytes of memory available to new processes; enough for 4 jobs where the system does not say."""
    try:
        with open("/proc/meminfo") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 * MEMORY_PER_JOB
