"""Processes of a torch.distributed group that wait for work: started once, used by many tests.

A test gives a function of this package and its arguments; every chosen process runs it with a group of the chosen ones.
With NCCL each process has a separate GPU.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 60.0  # seconds; a call that takes longer has hung
Function = Callable[..., Any]  # function(group, *arguments)


class Failure(Exception):
    """An error in a process, with its traceback."""


def _serve(
    rank: int,
    size: int,
    members_of_groups: list[tuple[int, ...]],
    backend: str,
    folder: str,
    timeout: timedelta,
    connection: Connection,
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        store=dist.FileStore(f"{folder}/store", size),
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    groups = {members: dist.new_group(list(members), timeout=timeout) for members in members_of_groups}
    while (work := connection.recv()) is not None:
        members, function, arguments, environment = work
        for name in ("FLASH_ATTN_MINI_CHECK", "FLASH_ATTN_MINI_TRACE"):
            os.environ.pop(name, None)
        os.environ.update(environment)
        try:
            result = (True, function(groups[members], *arguments))
        except Exception as error:
            result = (False, (type(error).__name__, str(error), traceback.format_exc()))
        connection.send(result)


class Ranks:
    """Processes and the groups that they can form, in which a message takes at most ``timeout`` seconds."""

    def __init__(
        self, groups: Sequence[tuple[int, ...]], folder: Path, backend: str = "gloo", timeout: float = TIMEOUT / 2
    ) -> None:
        # The fork server imports once for all processes; CUDA does not survive a fork.
        context = mp.get_context("spawn" if backend == "nccl" else "forkserver")
        if backend != "nccl":
            context.set_forkserver_preload(["tests.support.context_parallel_calls"])
        size = 1 + max(rank for members in groups for rank in members)
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            arguments = (rank, size, list(groups), backend, str(folder), timedelta(seconds=timeout), there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def attempt(self, members: tuple[int, ...], function: Function, *arguments: Any, **environment: str) -> list[Any]:
        """(True, result) or (False, (type, message, traceback)) of every member."""
        for rank in members:
            self._connections[rank].send((members, function, arguments, environment))
        results = []
        for rank in members:
            if not self._connections[rank].poll(TIMEOUT):
                raise TimeoutError(f"rank {rank} of {list(members)} does not answer: {function.__name__} hangs")
            try:
                results.append(self._connections[rank].recv())
            except EOFError:
                results.append((False, ("EOFError", f"process {rank} ended", "")))
        return results

    def run(self, members: tuple[int, ...], function: Function, *arguments: Any, **environment: str) -> list[Any]:
        """The result of every member."""
        results = self.attempt(members, function, *arguments, **environment)
        for rank, (done, result) in zip(members, results, strict=True):
            if not done:
                raise Failure(f"on rank {rank}:\n{result[2]}")
        return [result for _, result in results]

    def close(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in self._processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
