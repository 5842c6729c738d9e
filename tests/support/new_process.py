"""Runs Python in a new process that has torch already: a server imports it once, and each run is a fork of the server.

The import takes seconds, as long as many of these tests. Nothing else is imported before the fork, except Triton and
the compiler's front end where TRITON_INTERPRET=1: those runs are of pytest, which imports both. Each pytest process
starts its own servers.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_THOROUGH = "TESTS_WITHOUT_THOROUGH"  # set by conftest.py if the session leaves out what is marked thorough
INTERPRET = "TRITON_INTERPRET"  # Triton reads it when it is imported


@functools.cache
def _server(interprets: bool) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != INTERPRET}
    environment |= {"OMP_NUM_THREADS": "1"} | ({INTERPRET: "1"} if interprets else {})
    return subprocess.Popen(
        [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def run_python(
    *arguments: str, environment: dict[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """What `python ARGUMENTS` does, which are `-c CODE ...`, `-m MODULE ...` or `SCRIPT ...`."""
    environment = dict(os.environ if environment is None else environment)
    server = _server(environment.get(INTERPRET) == "1")
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/stdout", f"{folder}/stderr"]
        request = {"arguments": arguments, "environment": environment, "cwd": str(cwd), "files": files}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(arguments, status, *(Path(file).read_text() for file in files))


def run_pytest(file: str, *options: str, environment: dict[str, str]) -> None:
    """Run the tests of a file, without those marked thorough if this session leaves them out."""
    marks = ("-m", "not thorough") if WITHOUT_THOROUGH in os.environ else ()
    options = ("-q", "--tb=short", "-p", "no:cacheprovider", *marks, *options)
    result = run_python("-m", "pytest", file, *options, environment=environment)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]


def _run(arguments: list[str], environment: dict[str, str], cwd: str, files: list[str]) -> None:
    """In the forked process. It ends as any other: functions registered with atexit are called."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for descriptor, file in enumerate((os.devnull, *files)):
        opened = os.open(file, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    kind, *others = arguments
    sys.path[1:1] = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if kind == "-c":
        code, *parameters = others
        sys.argv, sys.path[0] = ["-c", *parameters], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(main))
    elif kind == "-m":
        sys.argv, sys.path[0] = others, cwd
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, str(Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")


def _serve() -> None:
    import torch

    if os.environ.get(INTERPRET) == "1":
        import torch._dynamo
        import triton  # noqa: F401

    assert torch.get_num_threads() == 1, "a fork has no threads of OpenMP"
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            _run(**json.loads(line))
            return
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _serve()
