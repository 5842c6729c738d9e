"""Messages between the ranks of a group, through torch.distributed. CUDA tensors need a group with NCCL, CPU tensors
one with gloo.

NCCL runs them on a separate stream, in the order of the calls. A message starts when the work that the current stream
had at its start is done. `wait` makes the current stream wait, not the host. Errors name the call.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..argument_checks import wrong_type

# What a GPU computes while a byte travels: 600 TFLOP/s of a forward; 150 GB/s between two H200s of a machine, 45 GB/s
# between machines with a 400 Gb/s adapter for each GPU. We assume eight GPUs in a machine.
FLOPS_OF_A_BYTE, FLOPS_OF_A_BYTE_BETWEEN_MACHINES = 4000.0, 13000.0
GPUS_OF_A_MACHINE = 8
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since PyTorch 2.13
# Devices on which a group has had its first collective. NCCL sets up a group in its first call, in which every rank
# has to take part.
_connected: weakref.WeakKeyDictionary[Any, set[torch.device]] = weakref.WeakKeyDictionary()


def as_process_group(group: Any) -> Any:
    """The ProcessGroup of a ``group`` argument."""
    if not dist.is_available():
        raise RuntimeError(
            "flash_attn_mini: this build of PyTorch has no torch.distributed, which context parallel needs"
        )
    if not dist.is_initialized():
        raise RuntimeError("flash_attn_mini: torch.distributed is not initialised; call init_process_group first")
    if group is None:
        group = dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("flash_attn_mini: group does not have this process; allowed: a group with this process")
    if isinstance(group, dist.ProcessGroup):
        return group
    from torch.distributed.device_mesh import DeviceMesh  # takes half a second to import, and few calls need it

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names
            raise ValueError(
                f"flash_attn_mini: group is a DeviceMesh of {group.ndim} dimensions {names}; allowed: one dimension, "
                "such as mesh['cp']"
            )
        return group.get_group()
    raise wrong_type("group", group, "a ProcessGroup, a one-dimensional DeviceMesh, or None for the default group")


def rank_in(group: Any) -> int:
    """This process's rank in a group."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("flash_attn_mini: group does not have this process; allowed: a group with this process")
    return rank


def size_of(group: Any) -> int:
    """The number of ranks."""
    return dist.get_world_size(group)


def check_backend(group: Any, device: torch.device) -> None:
    """Raise unless the group can move tensors of a device.

    PyTorch accepts CUDA tensors in a group with only gloo, too, but would copy every message through the host.
    """
    try:
        because = " (only through the host)"
        if (device.type, group._get_backend(device).name()) != ("cuda", "gloo"):
            return
    except RuntimeError as error:
        because = f" ({error})"
    raise RuntimeError(
        f"flash_attn_mini: the group of the shards has backend {dist.get_backend(group)}, which cannot move tensors on "
        f"{device}; allowed: nccl for CUDA tensors, gloo for CPU tensors{because}"
    )


class named:
    """A context that turns an error of torch.distributed into one that names the call."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise RuntimeError(
                f"flash_attn_mini: communication failed in {self._where}. Another rank ended, raised an error or made "
                f"another call ({error})"
            ) from error


@dataclass
class Message:
    """Transfers in flight. ``received`` is valid after `wait`."""

    where: str
    works: list[Any]
    received: list[torch.Tensor]
    sent: list[torch.Tensor] = field(default_factory=list)  # kept alive until the transfer has read them

    @property
    def is_under_way(self) -> bool:
        """Whether a transfer was started and not yet waited for."""
        return bool(self.works)

    def wait(self) -> list[torch.Tensor]:
        """Let the current stream (on the CPU: the host) wait for the transfers."""
        with named(self.where):
            for work in self.works:
                work.wait()
        self.works, self.sent = [], []
        return self.received


def connect(group: Any, device: torch.device) -> None:
    """Set up NCCL for a group. Point-to-point calls, which not every rank makes, must not be its first."""
    if device.type != "cuda" or size_of(group) == 1:
        return
    devices = _connected.setdefault(group, set())
    if device not in devices:
        with named("the first call of a group"):
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        devices.add(device)


def sms_beside(flops: float, message: Message, group: Any, device: torch.device) -> int:
    """SMs that forwards of so many FLOPs have to leave free for a message.

    Without them the message waits for the end of the forwards, and the next step for the message. With them the
    forwards take longer, in proportion to the SMs. 0 where that would take longer than the message itself.
    """
    sms = sms_of_messages(group, device)
    if sms == 0:
        return 0
    size = max(sum(x.numel() * x.element_size() for x in tensors) for tensors in (message.sent, message.received))
    others = max(_multiprocessors(device) - sms, 1)
    return sms if flops * sms / others < FLOPS_OF_A_BYTE * size else 0


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def sms_of_messages(group: Any, device: torch.device) -> int:
    """SMs that a kernel has to leave free so that messages overlap it; 0 if that would not help.

    Each CTA of an NCCL kernel needs a free SM. The number of CTAs is known only if the group limits it (``max_ctas`` in
    its options; environment variables of NCCL are not read). CTAs in clusters, NCCL's default on Hopper, need several
    free SMs of one GPC, which a smaller grid of another kernel does not leave.
    """
    if device.type != "cuda":
        return 0
    config = getattr(getattr(group._get_backend(device), "options", None), "config", None)
    most, cluster = (getattr(config, name, None) for name in ("max_ctas", "cga_cluster_size"))
    return most if most is not None and most > 0 and cluster in (0, 1) else 0


def exchange(
    to: int, sent: Sequence[torch.Tensor], source: int, received: Sequence[torch.Tensor], group: Any, where: str
) -> Message:
    """Start to send tensors to one rank and to receive tensors from another, all in one call. Empty ones do not travel.

    ``to`` and ``source`` are ranks in the group.
    """
    sent = [x for x in sent if x.numel() > 0]
    arriving = [x for x in received if x.numel() > 0]
    with named(where):
        ops = [dist.P2POp(dist.isend, x, dist.get_global_rank(group, to), group) for x in sent]
        ops += [dist.P2POp(dist.irecv, x, dist.get_global_rank(group, source), group) for x in arriving]
        works = dist.batch_isend_irecv(ops) if ops else []
    return Message(where, works, list(received), sent)


def all_to_all_rows(
    sent: torch.Tensor, send_rows: list[int], receive_rows: list[int], group: Any, where: str
) -> Message:
    """Start an all-to-all: rows ``send_rows[j]`` of dimension 0 go to rank j, ``receive_rows[i]`` come from rank i."""
    sent = sent.contiguous()
    received = sent.new_empty((sum(receive_rows), *sent.shape[1:]))
    works = []
    if sent.shape[1:].numel() > 0:
        with named(where):
            work = dist.all_to_all_single(
                _bytes(received),
                _bytes(sent),
                output_split_sizes=receive_rows,
                input_split_sizes=send_rows,
                group=group,
                async_op=True,
            )
        works.append(work)
    return Message(where, works, [received], [sent])


def all_gather_rows(x: torch.Tensor, rows: list[int], group: Any, where: str) -> torch.Tensor:
    """The rows of all ranks, rank after rank; ``rows`` are their numbers. ``x`` is contiguous."""
    most = max(rows)
    if most == 0 or x.shape[1:].numel() == 0:
        return x.new_empty((sum(rows), *x.shape[1:]))
    padded = x
    if x.shape[0] < most:
        padded = x.new_zeros((most, *x.shape[1:]))
        padded[: x.shape[0]] = x
    gathered = x.new_empty((most * len(rows), *x.shape[1:]))
    with named(where):
        _all_gather(_bytes(gathered), _bytes(padded), group=group)
    if all(number == most for number in rows):
        return gathered
    by_rank = gathered.view(len(rows), most, *x.shape[1:])
    return torch.cat([by_rank[rank, :number] for rank, number in enumerate(rows)])


def sum_of_rows(x: torch.Tensor, rows: list[int], group: Any, where: str) -> torch.Tensor:
    """The sum over ranks of their values for this rank's rows, added in the order of the ranks.

    ``x`` has the rows of all ranks, rank after rank. 16-bit values are added in float32, complex ones as complex.
    """
    mine = rows[rank_in(group)]
    (received,) = all_to_all_rows(x, rows, [mine] * len(rows), group, where).wait()
    wide = torch.float32 if x.dtype.itemsize == 1 else torch.promote_types(x.dtype, torch.float32)  # float8: no rule
    return received.view(len(rows), mine, *x.shape[1:]).sum(0, dtype=wide)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as ``[rows, bytes of a row]``: gloo does not know every dtype."""
    return x.view(x.shape[0], x.shape[1:].numel()).view(torch.uint8)


def gather_objects(value: Any, group: Any, where: str) -> list[Any]:
    """The values of all ranks, on every rank."""
    values: list[Any] = [None] * size_of(group)
    with named(where):
        dist.all_gather_object(values, value, group=group)
    return values
