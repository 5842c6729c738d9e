"""Builds the extension flash_attn_mini._C from host files, compiled against the target environment's torch, and kernels
that do not depend on torch: objects (build_tools/kernels.py), or the library of a wheel (build_tools/kernel_wheel.py).
Without a C++ compiler the package has no extension. `python setup.py build_kernels` compiles only the kernels, and
`python setup.py kernel_wheel` packs them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # an isolated build does not put this folder on the path

from build_tools import kernel_wheel, kernels, plan, selection, target_torch  # noqa: E402

HOST_SOURCES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/*/*.cpp"))
# The files of csrc/api are compiled as two, the longer first: most of their time goes to torch's headers.
# So names in their anonymous namespaces must differ within a group. current_stream.cpp defines a macro for torch's
# headers, so it is in neither group.
GROUPS = {
    "with_autograd": ("autograd", "backend_choice", "bindings", "check_tensors", "checks", "checks_kvcache"),
    "with_ops": (
        *("allocation", "attn_bias", "flash_api", "kernel_inputs", "memory_overlap", "ops", "score_mod", "sdpa"),
        "set_params",
    ),
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


NO_EXTENSION = (
    "the package has no extension, because {why}. NVIDIA GPUs take the Triton backend. CPU tensors take the reference, "
    "which is slow. For the compiled backends {remedy}, and install again"
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


def say(message: str) -> None:
    print(f"flash_attn_mini: {message}", flush=True)


def say_no_extension() -> None:
    is_asked = os.environ.get("FLASH_ATTN_MINI_EXTENSION") == "0"
    why = "FLASH_ATTN_MINI_EXTENSION is 0" if is_asked else "there is no C++ compiler"
    say(NO_EXTENSION.format(why=why, remedy="unset it" if is_asked else "install g++"))


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


class BuildKernelWheel(Command):
    """Packs the kernels as the wheel flash_attn_mini_kernels; needs nvcc, but neither torch nor a GPU."""

    description = "compile the CUDA kernels and pack them as a wheel"
    user_options = [("dist-dir=", "d", "folder for the wheel (default: dist)")]

    def initialize_options(self) -> None:
        self.dist_dir = "dist"

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        asked = selection.asked_archs()
        if asked == ():
            raise SystemExit("FLASH_ATTN_MINI_ARCHS is 'none'; allowed for a wheel of kernels: compute capabilities")
        chosen = selected(asked or kernel_wheel.DEFAULT_ARCHS)
        version = self.distribution.get_version()
        path = kernel_wheel.build(chosen, selection.max_jobs(), version, Path(self.dist_dir).resolve())
        say(f"{path} has {path.stat().st_size / 2**20:.1f} MiB")


class Build(build):
    """Says what is missing where the extension is not built."""

    def run(self) -> None:
        if not self.distribution.ext_modules:
            say_no_extension()
        super().run()


class BuildExtension(build_ext):
    """Finds torch, chooses what to build, then runs torch's own BuildExtension."""

    def run(self) -> None:
        if not self.extensions:
            say_no_extension()
            return
        target_torch.import_path()
        jobs = selection.max_jobs()
        os.environ["MAX_JOBS"] = str(jobs)  # torch's BuildExtension passes it to ninja
        if selection.host_compiler() == "g++":
            os.environ["CXX"] = "g++"  # torch runs c++ otherwise

        import torch

        planned = plan.plan(torch.__version__, torch.version.cuda)
        say(planned.message)
        from torch.utils import cpp_extension

        extension = self.distribution.ext_modules[0]
        self.describe(extension, cpp_extension, planned, jobs)
        command = cpp_extension.BuildExtension.with_options(no_python_abi_suffix=False)(self.distribution)
        for option in ("inplace", "build_lib", "build_temp", "editable_mode", "force", "debug"):
            setattr(command, option, getattr(self, option))
        command.ensure_finalized()
        command.run()

    def describe(self, extension: Extension, cpp_extension, planned: plan.Plan, jobs: int) -> None:
        import torch

        sanitizes = os.environ.get("FLASH_ATTN_MINI_SANITIZE", "0") not in ("", "0")
        chosen = planned.selection
        defines = [("FLASH_TORCH_VERSION", f'"{torch.__version__}"')]
        extra: dict = {}
        link_args = ["-fopenmp", *(SANITIZE if sanitizes else ())]
        if chosen.archs:
            defines += [
                ("FLASH_WITH_CUDA", None),
                ("FLASH_ARCHS", ",".join(map(str, chosen.capabilities))),
                ("FLASH_ARCHS_EXACT", ",".join(map(str, chosen.exact_capabilities))),
                ("FLASH_HDIMS", ",".join(map(str, chosen.hdims))),
                ("FLASH_DTYPES", ",".join(f"flash::DType::{selection.ALL_DTYPES[name]}" for name in chosen.dtypes)),
            ]
            if chosen.has_sm90:
                defines.append(("FLASH_WITH_SM90", None))
            extra["libraries"] = ["torch_cuda"]
        if planned.wheel is not None:
            # Both packages lie in one folder, except where the extension is built into the checkout.
            is_installed_elsewhere = self.inplace or self.editable_mode
            folder = planned.wheel.folder if is_installed_elsewhere else f"$ORIGIN/../{kernel_wheel.PACKAGE}"
            link_args += [f"-Wl,-rpath,{folder}", "-Wl,-z,now"]  # now: a missing kernel is an error of the import
            extra["extra_objects"] = [str(planned.wheel.library)]
        elif chosen.archs:
            extra["extra_objects"] = [str(path) for path in kernels.build_kernels(chosen, jobs)]
            extra["libraries"] += ["cudart"]
            extra["library_dirs"] = [str(kernels.cuda_library_dir())]
        configured = cpp_extension.CppExtension(
            name=extension.name,
            sources=grouped_sources(Path(self.build_temp)),
            include_dirs=[str(ROOT / "csrc")],
            define_macros=defines,
            # -g0: Python adds -g, which takes a quarter of the time.
            extra_compile_args={
                "cxx": ["-O3", "-g0", "-fopenmp", "-fvisibility=hidden", *(SANITIZE if sanitizes else ())]
            },
            extra_link_args=link_args,
            **extra,
        )
        vars(extension).update(vars(configured))


setup(
    ext_modules=[Extension("flash_attn_mini._C", HOST_SOURCES)] if selection.wants_extension() else [],
    cmdclass={
        "build": Build,
        "build_ext": BuildExtension,
        "build_kernels": BuildKernels,
        "kernel_wheel": BuildKernelWheel,
    },
)
