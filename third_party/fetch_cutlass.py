"""Puts CUTLASS's headers, pinned in cutlass.txt, into third_party/cutlass (git-ignored); the CUDA build calls it.

pip downloads the wheel and verifies its checksum. CUTLASS_PATH, a CUTLASS checkout or its include folder, takes
precedence: nothing is fetched then. One build fetches while the others wait for its lock, and current headers are never
replaced. Run `python third_party/fetch_cutlass.py --help` for machines without a network.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENT = HERE / "cutlass.txt"
TARGET = HERE / "cutlass"
LOCK = HERE / ".cutlass-lock"
IN_WHEEL = "cutlass_library/source/include/"
LANDMARKS = ("cute/tensor.hpp", "cutlass/version.h")


class CutlassError(RuntimeError):
    """CUTLASS is missing or not what was pinned; the message says what to do."""


def cutlass_include_dir() -> Path:
    """The folder to pass to the compiler as -I; fetches the pinned headers where they are missing."""
    override = os.environ.get("CUTLASS_PATH")
    if override:
        for folder in (Path(override) / "include", Path(override)):
            if _has_headers(folder):
                return folder.resolve()
        raise CutlassError(f"CUTLASS_PATH={override} holds no {' and '.join(LANDMARKS)}, nor does its include folder")
    if not _is_current():
        with _locked(), tempfile.TemporaryDirectory() as scratch:
            if not _is_current():  # else another build fetched them in the meantime
                _unpack(_download(Path(scratch)))
    return TARGET / "include"


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """One process at a time; the system releases the lock of a process that dies."""
    try:
        file = LOCK.open("w")
    except OSError as error:
        raise CutlassError(f"{HERE} cannot be written ({error.strerror}); set CUTLASS_PATH") from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _pin() -> tuple[str, str]:
    """The requirement (name==version) and the wheel's sha256 from cutlass.txt."""
    match = re.search(r"^(\S+==\S+)\s+--hash=sha256:([0-9a-f]{64})$", REQUIREMENT.read_text(), re.MULTILINE)
    if match is None:
        raise CutlassError(f"{REQUIREMENT} holds no line 'name==version --hash=sha256:...'")
    return match[1], match[2]


def _has_headers(folder: Path) -> bool:
    return all((folder / landmark).is_file() for landmark in LANDMARKS)


def _is_current() -> bool:
    stamp = TARGET / "PIN"
    return stamp.is_file() and stamp.read_text() == " ".join(_pin()) and _has_headers(TARGET / "include")


def _download(folder: Path) -> Path:
    requirement, _ = _pin()
    print(f"Fetching the headers of {requirement} into {TARGET}", file=sys.stderr)
    arguments = ["download", "--require-hashes", "--no-deps", "--only-binary=:all:", "--quiet", "--dest", str(folder)]
    # Without PYTHON* variables: an isolated build hides the environment's pip behind PYTHONPATH.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        [*_pip(environment), *arguments, "--requirement", str(REQUIREMENT)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise CutlassError(
            f"pip could not download {requirement}. Without a network, bring the wheel and run "
            f"`python {Path(__file__).name} --wheel FILE`, or set CUTLASS_PATH. pip said:\n{result.stdout.strip()}"
        )
    return wheels[0]


def _pip(environment: dict[str, str]) -> list[str]:
    module = [sys.executable, "-m", "pip"]
    if subprocess.run([*module, "--version"], env=environment, capture_output=True).returncode == 0:
        return module
    for name in ("pip3", "pip"):
        if shutil.which(name):
            return [name]
    raise CutlassError(f"CUTLASS's headers are fetched by pip, and {sys.executable} has none; or set CUTLASS_PATH")


def _unpack(wheel: Path) -> None:
    """Puts the wheel's headers into third_party/cutlass by one rename, so that no reader sees half of them."""
    requirement, sha256 = _pin()
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != sha256:
        raise CutlassError(f"{wheel} is not {requirement}: its sha256 is {found}, cutlass.txt says {sha256}")
    if _is_current():
        return
    with tempfile.TemporaryDirectory(prefix=".cutlass-", dir=HERE) as scratch:
        fresh = Path(scratch) / "cutlass"
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                relative = member.filename.removeprefix(IN_WHEEL)
                if member.filename.endswith("/LICENSE.txt") and "dist-info" in member.filename:
                    destination = fresh / "LICENSE.txt"
                elif relative != member.filename and not member.is_dir():
                    destination = fresh / "include" / relative
                else:
                    continue
                destination.parent.mkdir(parents=True, exist_ok=True)
                destination.write_bytes(archive.read(member))
        if not _has_headers(fresh / "include"):
            raise CutlassError(f"{wheel} holds no {IN_WHEEL}{LANDMARKS[0]}")
        (fresh / "PIN").write_text(" ".join(_pin()))
        if TARGET.exists():  # of another version
            TARGET.rename(Path(scratch) / "old")
        fresh.rename(TARGET)


def main() -> int:
    """Fetches and prints the include folder; 1 with one line on stderr where that fails."""
    parser = argparse.ArgumentParser(description="Puts the pinned CUTLASS headers into third_party/cutlass.")
    parser.add_argument("--wheel", type=Path, help="unpack this local file (checksum verified) instead of downloading")
    wheel = parser.parse_args().wheel
    try:
        if wheel is not None:
            with _locked():
                _unpack(wheel)
        print(cutlass_include_dir())
    except (CutlassError, OSError, zipfile.BadZipFile) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
