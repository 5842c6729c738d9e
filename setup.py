"""Builds the extension flash_attn_mini._C from host files, compiled against the target environment's torch, and kernel
objects that do not depend on torch (build_tools/kernels.py). `python setup.py build_kernels` compiles only the kernels.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # an isolated build does not put this folder on the path

from build_tools import kernels, selection, target_torch  # noqa: E402

HOST_SOURCES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/*/*.cpp"))
# The files of csrc/api are compiled as two, the longer first: most of their time goes to torch's headers.
# So names in their anonymous namespaces must differ within a group.
GROUPS = {
    "with_autograd": ("autograd", "backend_choice", "bindings", "check_tensors", "checks", "checks_kvcache"),
    "with_ops": ("allocation", "flash_api", "memory_overlap", "ops", "score_mod", "set_params"),
}

# FLASH_ATTN_MINI_SANITIZE=1 (tests/sanitize/sanitize_cpu.py). vptr would need the type information of torch's classes.
SANITIZE = (
    "-O1",
    "-g1",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize=vptr",
    "-fno-sanitize-recover=all",
)


def selected(archs: tuple[str, ...]) -> selection.Selection:
    return selection.Selection(archs, selection.select_hdims(), selection.select_dtypes())


def grouped_sources(folder: Path) -> list[str]:
    """The files to compile: one in `folder` for each of GROUPS, which includes its members, then the other sources."""
    groups, members = [], {f"csrc/api/{name}.cpp" for names in GROUPS.values() for name in names}
    folder.mkdir(parents=True, exist_ok=True)
    for group, names in GROUPS.items():
        path, text = folder / f"{group}.cpp", "".join(f'#include "api/{name}.cpp"\n' for name in names)
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)  # a file that does not change is not compiled again
        groups.append(str(path))
    return [*groups, *(source for source in HOST_SOURCES if source not in members)]


class BuildKernels(Command):
    """Fills the kernel cache; needs nvcc, but neither torch nor a GPU."""

    description = "compile the CUDA kernels into the cache"
    user_options: list[tuple[str, str | None, str]] = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        kernels.build_kernels(selected(selection.select_archs()), selection.max_jobs())


class BuildExtension(build_ext):
    """Finds torch, chooses what to build, then runs torch's own BuildExtension."""

    def run(self) -> None:
        target_torch.import_path()
        jobs = selection.max_jobs()
        os.environ["MAX_JOBS"] = str(jobs)  # torch's BuildExtension passes it to ninja

        import torch

        archs = selection.select_archs() if torch.version.cuda else ()
        if archs:
            os.environ["CUDA_HOME"] = str(kernels.cuda_home())  # read when cpp_extension is imported
        elif torch.version.cuda:
            print("flash_attn_mini: FLASH_ATTN_MINI_ARCHS=none, so only the CPU backend is built", flush=True)
        else:
            print(
                f"flash_attn_mini: torch {torch.__version__} has no CUDA, so only the CPU backend is built", flush=True
            )

        from torch.utils import cpp_extension

        extension = self.distribution.ext_modules[0]
        self.describe(extension, cpp_extension, selected(archs), jobs)
        command = cpp_extension.BuildExtension.with_options(no_python_abi_suffix=False)(self.distribution)
        for option in ("inplace", "build_lib", "build_temp", "editable_mode", "force", "debug"):
            setattr(command, option, getattr(self, option))
        command.ensure_finalized()
        command.run()

    def describe(self, extension: Extension, cpp_extension, chosen: selection.Selection, jobs: int) -> None:
        import torch

        sanitizes = os.environ.get("FLASH_ATTN_MINI_SANITIZE", "0") not in ("", "0")
        defines = [("FLASH_TORCH_VERSION", f'"{torch.__version__}"')]
        extra: dict = {}
        factory = cpp_extension.CppExtension
        if chosen.archs:
            factory = cpp_extension.CUDAExtension
            defines += [
                ("FLASH_WITH_CUDA", None),
                ("FLASH_ARCHS", ",".join(map(str, chosen.capabilities))),
                ("FLASH_ARCHS_EXACT", ",".join(map(str, chosen.exact_capabilities))),
                ("FLASH_HDIMS", ",".join(map(str, chosen.hdims))),
                ("FLASH_DTYPES", ",".join(f"flash::DType::{selection.ALL_DTYPES[name]}" for name in chosen.dtypes)),
            ]
            if chosen.has_sm90:
                defines.append(("FLASH_WITH_SM90", None))
            extra["extra_objects"] = [str(path) for path in kernels.build_kernels(chosen, jobs)]
        configured = factory(
            name=extension.name,
            sources=grouped_sources(Path(self.build_temp)),
            include_dirs=[str(ROOT / "csrc")],
            define_macros=defines,
            # -g0: Python adds -g, which takes a quarter of the time.
            extra_compile_args={
                "cxx": ["-O3", "-g0", "-fopenmp", "-fvisibility=hidden", *(SANITIZE if sanitizes else ())]
            },
            extra_link_args=["-fopenmp", *(SANITIZE if sanitizes else ())],
            **extra,
        )
        vars(extension).update(vars(configured))


setup(
    ext_modules=[Extension("flash_attn_mini._C", HOST_SOURCES)],
    cmdclass={"build_ext": BuildExtension, "build_kernels": BuildKernels},
)
