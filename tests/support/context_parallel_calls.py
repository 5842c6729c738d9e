"""What the processes of test_context_parallel.py and test_context_parallel_gpu.py run.

Each function takes the group first.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from flash_attn_mini import cp_flash_attn_func, cp_flash_attn_varlen_func, packed_shards, zigzag_shards
from flash_attn_mini.context_parallel import Shards, ring, transport, ulysses
from flash_attn_mini.context_parallel.streams import side_stream_of

from .poison import poisoned


def device_of(group: Any) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


Lengths = int | tuple[int, ...]  # of one sequence, or of packed documents


def shards_of(lengths: Lengths, group: Any) -> Shards:
    if isinstance(lengths, int):
        return zigzag_shards(lengths, group)
    return packed_shards(torch.tensor([0, *lengths]).cumsum(0), group)


def draw(
    lengths: Lengths,
    batch: int,
    heads: tuple[int, int],
    headdim: int,
    dtype: torch.dtype,
    seed: int,
    headdim_v: int | None = None,
) -> tuple[Tensor, ...]:
    """q, k, v, dout and the gradient of the log-sum-exp: global tensors, packed if the lengths are.

    headdim_v: of v and dout; None: headdim.
    """
    generator = torch.Generator().manual_seed(seed)
    before = (batch, lengths) if isinstance(lengths, int) else (sum(lengths),)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    columns = headdim if headdim_v is None else headdim_v
    q, k = (normal(*before, count, headdim) for count in heads)
    v, dout = (normal(*before, count, columns) for count in (heads[1], heads[0]))
    lse_shape = (batch, heads[0], lengths) if isinstance(lengths, int) else (heads[0], sum(lengths))
    dlse = torch.randn(lse_shape, generator=generator, dtype=torch.float64)
    return q, k, v, dout, dlse.to(torch.float64 if dtype == torch.float64 else torch.float32)


def poisoned_rows(x: Tensor) -> Tensor:
    """The values of x in a buffer of NaN, with rows of NaN between its rows."""
    rows_dim = x.ndim - 3
    rows = x.shape[rows_dim]
    shape = (*x.shape[:rows_dim], 2 * rows, *x.shape[rows_dim + 1 :])
    strided = poisoned(shape, x.dtype, x.device.type).unflatten(rows_dim, (rows, 2)).select(rows_dim + 1, 0)
    return strided.copy_(x)


def attend(
    group: Any, lengths: Lengths, tensors: tuple[Tensor, ...], strategy: str, options: dict[str, Any]
) -> tuple[Tensor, ...] | None:
    """out, log-sum-exp, dq, dk and dv, merged; only from the first rank."""
    shards = shards_of(lengths, group)
    is_packed = not isinstance(lengths, int)
    function = cp_flash_attn_varlen_func if is_packed else cp_flash_attn_func
    rows = 0 if is_packed else 1
    q, k, v, dout, dlse = (x.to(device_of(group)) for x in tensors)
    slopes = options.get("alibi_slopes")
    if slopes is not None:
        options = options | {"alibi_slopes": slopes.to(q.device)}
    leaves = [poisoned_rows(shards.split(x, rows)).requires_grad_() for x in (q, k, v)]
    out, lse, _ = function(*leaves, shards, **options, strategy=strategy, return_attn_probs=True)
    gradients = torch.autograd.grad((out, lse), leaves, (shards.split(dout, rows), shards.split(dlse, -1)))
    merged = [shards.merge(out.detach(), rows), shards.merge(lse.detach(), -1)]
    merged += [shards.merge(x, rows) for x in gradients]
    return tuple(x.cpu() for x in merged) if shards.rank == 0 else None


def attend_with_sinks(
    group: Any,
    lengths: Lengths,
    tensors: tuple[Tensor, ...],
    strategy: str,
    options: dict[str, Any],
    sinks: Tensor,
) -> tuple[Tensor, ...] | None:
    """The results of `attend`, and the sum over the ranks of their gradients of the sinks."""
    leaf = sinks.to(device_of(group)).requires_grad_()
    shards = shards_of(lengths, group)
    is_packed = not isinstance(lengths, int)
    function = cp_flash_attn_varlen_func if is_packed else cp_flash_attn_func
    rows = 0 if is_packed else 1
    q, k, v, dout, dlse = (x.to(leaf.device) for x in tensors)
    leaves = [poisoned_rows(shards.split(x, rows)).requires_grad_() for x in (q, k, v)]
    out, lse, _ = function(*leaves, shards, **options, strategy=strategy, return_attn_probs=True, learnable_sink=leaf)
    *of_inputs, of_sinks = torch.autograd.grad(
        (out, lse), [*leaves, leaf], (shards.split(dout, rows), shards.split(dlse, -1))
    )
    dist.all_reduce(of_sinks, group=group)
    merged = [shards.merge(out.detach(), rows), shards.merge(lse.detach(), -1)]
    merged += [shards.merge(x, rows) for x in of_inputs]
    return tuple(x.cpu() for x in (*merged, of_sinks)) if shards.rank == 0 else None


def attend_in_small_groups(group: Any, *arguments: Any) -> tuple[Tensor, ...] | None:
    """`attend` with Ulysses' heads in as many groups as there can be."""
    least, ulysses.LEAST_ROWS = ulysses.LEAST_ROWS, 1
    try:
        return attend(group, *arguments)
    finally:
        ulysses.LEAST_ROWS = least


def repeat(group: Any, *arguments: Any) -> bool:
    """Whether two runs have the same bits."""
    first, second = (attend(group, *arguments) for _ in range(2))
    return first is None or second is None or all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def merge_with_gradient(group: Any, x: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The merged tensor, and the merged gradient of the sum of weights[rank] x (merged tensor)."""
    shards = zigzag_shards(x.shape[1], group)
    local = shards.split(x, 1).requires_grad_()
    merged = shards.merge(local, 1)
    (gradient,) = torch.autograd.grad((merged * weights[shards.rank]).sum(), local, torch.ones((), dtype=x.dtype))
    return merged.detach(), shards.merge(gradient, -2)


def merge_conjugate(group: Any, x: Tensor) -> Tensor:
    shards = zigzag_shards(x.shape[1], group)
    return shards.merge(shards.split(x, 1).conj(), 1).resolve_conj()


def compiled_split_and_merge(group: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """A compiled function that splits and merges, and its gradient."""
    shards = zigzag_shards(x.shape[1], group)
    x = x.clone().requires_grad_()
    function = torch.compile(lambda x: shards.merge(shards.split(x.sin(), 1).exp(), 1).cos(), backend="eager")
    merged = function(x)
    (gradient,) = torch.autograd.grad(merged.sum() / shards.size, x)
    dist.all_reduce(gradient, group=group)
    return merged.detach(), gradient


def partly_wanted(group: Any, tensors: tuple[Tensor, ...], strategy: str) -> list[Tensor | None]:
    """Gradients where only v requires one, and only the log-sum-exp of q, k in a second call."""
    shards = zigzag_shards(tensors[0].shape[1], group)
    q, k, v, dout, dlse = (shards.split(x, dim) for x, dim in zip(tensors, (1, 1, 1, 1, -1), strict=True))
    v.requires_grad_()
    out = cp_flash_attn_func(q, k, v, shards, causal=True, strategy=strategy)
    (dv,) = torch.autograd.grad(out, v, dout)
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    _, lse, _ = cp_flash_attn_func(q, k, v.detach(), shards, causal=True, strategy=strategy, return_attn_probs=True)
    dq, dk = torch.autograd.grad(lse, (q, k), dlse)
    with torch.no_grad():
        assert not cp_flash_attn_func(q, k, v, shards, causal=True, strategy=strategy).requires_grad
    return [shards.merge(x, 1) for x in (dv, dq, dk)]


def loss_of_each_rank(
    group: Any, lengths: Lengths, tensors: tuple[Tensor, ...], strategy: str
) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """dq, dk and dv where rank 0 uses out and the log-sum-exp, rank 1 only the log-sum-exp, the others only out; and
    the gradients of out and the log-sum-exp. All are merged.
    """
    shards = shards_of(lengths, group)
    is_packed = not isinstance(lengths, int)
    function = cp_flash_attn_varlen_func if is_packed else cp_flash_attn_func
    rows = 0 if is_packed else 1
    q, k, v, dout = (shards.split(x, rows) for x in tensors[:4])
    dlse = shards.split(tensors[4], -1)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse, _ = function(*leaves, shards, causal=True, strategy=strategy, return_attn_probs=True)
    uses_out, uses_lse = shards.rank != 1, shards.rank <= 1
    results = [out] * uses_out + [lse] * uses_lse
    gradients = torch.autograd.grad(results, leaves, [dout] * uses_out + [dlse] * uses_lse)
    used = shards.merge(dout * uses_out, rows), shards.merge(dlse * uses_lse, -1)
    return [shards.merge(x, rows) for x in gradients], used


def under_autocast(group: Any, strategy: str) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of out and dq for float32 inputs."""
    shards = zigzag_shards(16, group)
    q = torch.randn(1, shards.tokens[shards.rank], 2, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = cp_flash_attn_func(q, q, q, shards, causal=True, strategy=strategy)
    (dq,) = torch.autograd.grad(out.sum(), q)
    return out.dtype, dq.dtype


def call_with(group: Any, changes: dict[int, dict[str, Any]]) -> None:
    """A call of every rank; ``changes`` of a rank replace its arguments."""
    rank = dist.get_rank(group)
    mine = {"heads": 4, "heads_k": 2, "tokens": 0, "length": 24, "dtype": torch.float32, "options": {}} | changes.get(
        rank, {}
    )
    shards = zigzag_shards(mine["length"], group)
    tokens = shards.tokens[rank] + mine["tokens"]
    q, k = (torch.randn(1, tokens, heads, 8).to(mine["dtype"]) for heads in (mine["heads"], mine["heads_k"]))
    cp_flash_attn_func(q, k, k, shards, **mine["options"])


def varlen_call_with(group: Any, options: dict[str, Any]) -> None:
    shards = packed_shards([0, 20, 30], group)
    q = torch.randn(shards.tokens[shards.rank], 2, 8)
    cp_flash_attn_varlen_func(q, q, q, shards, **options)


def dense_call_with_packed_shards(group: Any) -> None:
    shards = packed_shards([0, 20, 30], group)
    q = torch.randn(1, shards.tokens[shards.rank], 2, 8)
    cp_flash_attn_func(q, q, q, shards)


class Subclass(Tensor):
    """A tensor of another type, as a DTensor is."""


def call_with_a_subclass(group: Any) -> None:
    shards = zigzag_shards(8, group)
    q = torch.randn(1, shards.tokens[shards.rank], 2, 8)
    cp_flash_attn_func(q.as_subclass(Subclass), q, q, shards)


def double_backward(group: Any) -> None:
    shards = zigzag_shards(8, group)
    q = torch.randn(1, shards.tokens[shards.rank], 2, 8, requires_grad=True)
    out = cp_flash_attn_func(q, q, q, shards)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    dq.sum().backward()


def batched_gradients(group: Any) -> None:
    shards = zigzag_shards(8, group)
    q = torch.randn(1, shards.tokens[shards.rank], 2, 8, requires_grad=True)
    out = cp_flash_attn_func(q, q, q, shards)
    torch.autograd.grad(out, q, torch.ones(2, *out.shape), is_grads_batched=True)


def call_under_func(group: Any, transform: str, members: tuple[int, ...], merges: bool) -> None:
    """A call of every rank, of some of them under a transform of torch.func."""
    shards = zigzag_shards(8, group)

    def call(q: Tensor) -> Tensor:
        return shards.merge(q, 1) if merges else cp_flash_attn_func(q, q, q, shards)

    q = torch.randn(1, shards.tokens[shards.rank], 2, 8)
    if shards.rank not in members:
        call(q)
    elif transform == "grad":
        torch.func.grad(lambda x: call(x).sum())(q)
    elif transform == "vmap":
        torch.vmap(call)(torch.stack([q, q]))
    else:
        torch.func.jvp(call, (q,), (q,))


def merge_with(group: Any, changes: dict[int, dict[str, Any]]) -> None:
    """`Shards.merge` on every rank; ``changes`` of a rank replace its arguments."""
    mine: dict[str, Any] = {"rows": 0, "width": 4, "dtype": torch.float32, "length": 24, "grad": False, "dim": 0}
    mine |= changes.get(dist.get_rank(group), {})
    shards = zigzag_shards(mine["length"], group)
    x = torch.ones(shards.tokens[shards.rank] + mine["rows"], mine["width"], dtype=mine["dtype"])
    shards.merge(x.requires_grad_() if mine["grad"] else x, mine["dim"])


def merge_or_attend(group: Any) -> None:
    """Rank 0 merges where the others call attention."""
    if dist.get_rank(group) == 0:
        merge_with(group, {})
    else:
        call_with(group, {})


def merge_twice_differentiated(group: Any) -> None:
    shards = zigzag_shards(8, group)
    x = torch.randn(shards.tokens[shards.rank], requires_grad=True)
    torch.autograd.grad(shards.merge(x, 0).square().sum(), x, create_graph=True)


class Layer(nn.Module):
    """A projection, attention and a projection back, on local rows."""

    def __init__(self, shards: Shards, width: int, heads: int) -> None:
        super().__init__()
        self.shards, self.heads = shards, heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return self.out(cp_flash_attn_func(q, k, v, self.shards, causal=True).flatten(-2))


def train_layer(group: Any, x: Tensor, how: str) -> dict[str, Tensor]:
    """The gradients of a layer's parameters for the loss mean(out squared), as every rank sees them."""
    device = device_of(group)
    if how in ("mesh", "fsdp"):  # two replicas of two ranks each: a batch row for each replica
        mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replica", "context"))
        shards = zigzag_shards(x.shape[1], mesh["context"])
        rows = x[mesh.get_local_rank("replica") :: 2]
    else:
        shards, rows = zigzag_shards(x.shape[1], group), x
    graphs: list[Any] = []

    def count(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.manual_seed(5)
    layer = Layer(shards, x.shape[-1], 4)
    local = shards.split(rows, 1)
    if how == "mesh":
        model: Any = nn.parallel.DistributedDataParallel(layer, process_group=mesh["replica"].get_group())
    elif how == "fsdp":
        model = fully_shard(layer, mesh=mesh["replica"])
    elif how == "compiled":
        model = torch.compile(layer, backend=count)
    elif how == "checkpointed":
        model = lambda x: checkpoint(layer, x, use_reentrant=False)  # noqa: E731
    else:
        model = layer
    out = model(local)
    assert how != "compiled" or len(graphs) >= 2, "the parts before and after attention are not compiled"
    (out.square().sum() / rows.numel()).backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    if how == "fsdp":
        gradients = {name: gradient.full_tensor() for name, gradient in gradients.items()}
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=shards.group)
    return gradients


def call_without_a_backend_for_the_device(group: Any) -> None:
    transport.check_backend(group, torch.device("cuda"))


def end_in_the_middle(group: Any) -> None:
    """The last rank ends after its first call, while the others wait for its keys."""
    shards, device = zigzag_shards(64, group), device_of(group)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q = torch.randn(1, shards.tokens[shards.rank], 2, 64, device=device, dtype=dtype)
    cp_flash_attn_func(q, q, q, shards, strategy="ring")
    if shards.rank == shards.size - 1:
        os._exit(1)
    cp_flash_attn_func(q, q, q, shards, strategy="ring")


def train_example(group: Any, folder: str) -> int:
    """The training example, spread over the processes of the default group."""
    example = importlib.import_module("examples.train_char_gpt")
    size = replace(example.SIZES["cpu"], layers=1, width=64, heads=2, context=61, batch=3)
    example.SIZES["cpu"] = size
    return example.main(["--device", "cpu", "--steps", "4", "--context-parallel", "--out", folder])


def traced(group: Any) -> str:
    """What a call prints on stderr under FLASH_ATTN_MINI_TRACE=1."""
    shards = zigzag_shards(20, group)
    q, k = torch.randn(1, shards.tokens[shards.rank], 5, 8).split([4, 1], 2)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        cp_flash_attn_func(q, k, k, shards)
    return printed.getvalue()


def repeat_behind_delays(group: Any, tensors: tuple[Tensor, ...], strategy: str) -> bool:
    """Whether calls give the same bits while some rank's GPU is late, with the ring's steps during own work or after
    it."""
    device = device_of(group)
    shards = zigzag_shards(tensors[0].shape[1], group)
    q, k, v, dout = (shards.split(x.to(device), 1).requires_grad_() for x in tensors[:4])
    expected: tuple[Tensor, ...] | None = None
    same = True
    for turn, bytes_of_l2 in enumerate([1 << 40] * 12 + [0] * (12 if strategy == "ring" else 0)):
        if expected is not None and turn % shards.size == shards.rank:
            torch.cuda._sleep(20_000_000)
        with mock.patch.object(ring, "_bytes_of_l2", lambda device, size=bytes_of_l2: size):
            out = cp_flash_attn_func(q, k, v, shards, causal=True, deterministic=True, strategy=strategy)
            results = (out.detach(), *torch.autograd.grad(out, (q, k, v), dout.detach()))
        scratch = [torch.full((1 << 22,), float("nan"), device=device)]  # reuses freed memory
        if q.is_cuda:
            with torch.cuda.stream(side_stream_of(q.device)):
                scratch += [torch.full((1 << size,), float("nan"), device=device) for size in range(16, 23)]
        expected = expected or results
        same = same and all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
        del scratch
    return same


def attend_beside_messages(group: Any, tensors: tuple[Tensor, ...]) -> tuple[list[int], bool]:
    """The grids of the Hopper forwards with a group whose messages take 8 CTAs, and whether results keep their bits."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas, options.config.cga_cluster_size = 8, 1
    # Every process takes part. With use_local_synchronization=True the ranks would hang: each names the group after the
    # number of groups that it is in, and rank 0 is in one more.
    ranks = dist.get_process_group_ranks(group)
    limited = dist.new_group(ranks, timeout=timedelta(seconds=30), pg_options=options)
    results = []
    for chosen in (group, limited):
        shards = zigzag_shards(tensors[0].shape[1], chosen)
        q, k, v = (shards.split(x.to(device_of(group)), 1) for x in tensors[:3])
        with all_traces() as lines:
            results.append(cp_flash_attn_func(q, k, v, shards, causal=True, strategy="ring"))
    grids = [int(x) for x in re.findall(r"flash_fwd_kernel .* grid=(\d+)", "".join(lines))]
    return grids, torch.equal(*results)


@contextlib.contextmanager
def all_traces() -> Iterator[list[str]]:
    """A context whose traces, of Python and of C++, are in the list after it."""
    lines: list[str] = []
    stderr = os.dup(2)
    os.environ["FLASH_ATTN_MINI_TRACE"] = "1"
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            del os.environ["FLASH_ATTN_MINI_TRACE"]
            file.seek(0)
            lines += file.readlines()


def memory_of_a_ring(group: Any) -> tuple[float, float, float]:
    """Bytes at the peak of a forward without the inputs and float32 results, at that of a backward without the inputs
    and the gradients, and the bytes of K and V."""
    device = device_of(group)
    shards = zigzag_shards(4096 * dist.get_world_size(group), group)
    tokens = shards.tokens[shards.rank]
    q, k, v = (torch.randn(1, tokens, 16, 128, device=device).bfloat16() for _ in range(3))
    for _ in range(2):  # the first call sets up NCCL
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        cp_flash_attn_func(q, k, v, shards, causal=True, strategy="ring")
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    block = float(k.numel() * k.element_size() * 2)
    results = q.numel() * (4 + 2 + 2)  # float32 sum, one partial and one final result in 16 bits
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = cp_flash_attn_func(*leaves, shards, causal=True, strategy="ring")
    dout = torch.randn_like(out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(out, leaves, dout)
    torch.cuda.synchronize()
    peak_of_backward = torch.cuda.max_memory_allocated() - before
    return peak - results, peak_of_backward - sum(x.numel() * x.element_size() for x in gradients), block
