"""Compiles the CUDA kernels of rungs 6 and 7, in csrc/, when one of them runs for the first time.

torch.utils.cpp_extension compiles them for the GPUs of this machine, or for TORCH_CUDA_ARCH_LIST, and keeps the result
in its cache (TORCH_EXTENSIONS_DIR). Needs nvcc, a C++ compiler, ninja, and the headers of CUTLASS, which are fetched.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import torch

from build_tools.kernels import cuda_home
from third_party.fetch_cutlass import CutlassError, cutlass_include_dir

CSRC = Path(__file__).resolve().parent / "csrc"
CSRC_OF_PRODUCT = CSRC.parent.parent / "csrc"  # for common/message.h
SOURCES = ("bindings.cpp", "flash_attn_minimal.cu", "flash_attn_tensor_cores.cu")
NVCC_FLAGS = ("-O3", "-std=c++17", "--expt-relaxed-constexpr", "-lineinfo", "-DNDEBUG")


def missing_reason() -> str | None:
    """None when this machine has what the compilation needs, else one sentence that says what is missing."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA; install a CUDA build of torch"
    if importlib.util.find_spec("ninja") is None and shutil.which("ninja") is None:
        return "ninja is not installed, and the kernel is compiled when it first runs: pip install ninja"
    try:
        cuda_home()
    except SystemExit:
        return (
            "there is no nvcc, and the kernel is compiled when it first runs; install the CUDA toolkit or set CUDA_HOME"
        )
    return None


def unavailable_reason() -> str | None:
    """None when the kernels run here, compiled if need be; else one sentence that says why not."""
    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    return _compiled()[1]


def load() -> ModuleType:
    """The functions of csrc/bindings.cpp.

    Raises:
        RuntimeError: If something is missing, or the compilation fails.
    """
    module, reason = _compiled()
    if module is None:
        raise RuntimeError(reason)
    return module


@functools.cache
def _compiled() -> tuple[ModuleType | None, str | None]:
    """The module, or why there is none."""
    reason = missing_reason()
    if reason is not None:
        return None, reason
    from torch.utils import cpp_extension

    print("learn: compiling csrc/ with nvcc, if it has changed: a minute or two", file=sys.stderr, flush=True)
    cpp_extension.CUDA_HOME = str(cuda_home())  # torch looks only for nvcc, which may be a link outside of the toolkit
    # ninja is a program that pip puts next to the interpreter, which need not be on PATH.
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), before])
    try:
        module: ModuleType = cpp_extension.load(
            name="flash_attn_mini_learn",
            sources=[str(CSRC / name) for name in SOURCES],
            extra_include_paths=[str(CSRC_OF_PRODUCT), str(cutlass_include_dir())],
            extra_cflags=["-O3"],
            extra_cuda_cflags=list(NVCC_FLAGS),
        )
    except (CutlassError, ImportError, OSError, RuntimeError) as error:
        print(error, file=sys.stderr, flush=True)
        return None, "the kernels of learn/csrc do not compile or load; the message on stderr says why"
    finally:
        os.environ["PATH"] = before
    return module, None
