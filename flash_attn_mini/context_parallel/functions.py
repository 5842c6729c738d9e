"""`cp_flash_attn_func` and `cp_flash_attn_varlen_func`: attention over tokens that are spread over ranks.

Arguments are checked here, the strategy is chosen here, and autograd enters here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import tracing
from ..argument_checks import WindowSize, as_flag, checked_options, wrong_type
from ..backends import REFERENCE, extension, select_backend
from ..backends.triton import checks as triton_checks
from ..options import TENSOR_OPTIONS, Options, Sequences
from ..score_mod import modifies_rows, with_modified_rows
from ..transforms import autocast
from . import all_gather, blocks, checks, ring, transport, ulysses
from .kernels import Attention, BackwardInputs
from .shards import Shards, kept

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]
STRATEGIES = ("auto", ring.NAME, all_gather.NAME, ulysses.NAME)
# Where the ring's messages take longer than its work, `auto` takes ulysses if that sends less than this share of what
# the ring sends: the first and the last messages of ulysses hide behind nothing. Not tuned.
ULYSSES_SHARE = 0.5


class Arguments(NamedTuple):
    """The arguments that both public functions share, as they were given."""

    softmax_scale: Any
    causal: Any
    window_size: Any
    softcap: Any
    alibi_slopes: Any
    deterministic: Any
    return_attn_probs: Any
    learnable_sink: Any
    key_ranges: Any


def cp_flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shards: Shards,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    strategy: str = "auto",
    learnable_sink: torch.Tensor | None = None,
    key_ranges: None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`flash_attn_func` on a sequence whose tokens are spread over the ranks of a group.

    Each rank passes the rows that `Shards` gives it, and gets its rows of the result. The result and the gradients
    equal those of `flash_attn_func` on the merged tensors, within the same allowed error. The exception is ALiBi with
    float32 on the backend ``triton`` (docs/context_parallel.md). Every rank has to make the same calls in the same
    order, the backward included: the loss of every rank has to depend on its out or on its softmax_lse. Which of the
    two may differ between ranks.

    Differentiable once in q, k and v, through out and through softmax_lse; with create_graph=True the backward raises
    NotImplementedError. Under torch.compile the call is a graph break. There is no dropout: the mask of dropout is a
    function of a row's place in one call, so it would depend on the number of ranks and on the strategy.

    On Hopper, options of the group decide whether the ring's messages overlap its forward: docs/context_parallel.md.

    Args:
        q: Local queries, ``[batch, tokens_local, nheads, headdim]``; dtypes, head dims and heads as in
            `flash_attn_func`.
        k: Local keys of the same tokens, ``[batch, tokens_local, nheads_k, headdim]``.
        v: Local values, shaped like k but for their head dim. With another one, tensors are copied to the larger of the
            two.
        shards: Who owns which tokens, from `zigzag_shards`.
        softmax_scale: As in `flash_attn_func`, and so are causal, window_size, softcap and alibi_slopes.
        deterministic: Make the gradients bitwise repeatable.
        return_attn_probs: Return ``(out, softmax_lse, S_dmask)`` in place of ``out``.
        strategy: ``"ring"``, ``"all_gather"``, ``"ulysses"``, or ``"auto"``: the ring where work hides its
            messages, else the strategy that sends less. ``FLASH_ATTN_MINI_TRACE=1`` prints the choice and its reason.
        learnable_sink: ``[nheads]`` or ``[batch, nheads]``, the same on every rank; see `flash_attn_func`. It joins the
            merged result once. A rank's gradient is that of its own rows: the sum over the ranks is the whole gradient.
        key_ranges: None: the option of `flash_attn_func` is not supported here.
        backend: As in `flash_attn_func`.

    Returns:
        out, ``[batch, tokens_local, nheads, headdim_v]``; or with ``return_attn_probs`` also softmax_lse, ``[batch,
        nheads, tokens_local]``, and an empty S_dmask.

    Raises:
        TypeError: For an argument of a wrong type or dtype.
        ValueError: For a wrong shape, device, stride or value; for tensors without the tokens of this rank; with
            FLASH_ATTN_MINI_CHECK=1 on every rank if the ranks' shapes, options or shards differ.
        NotImplementedError: For key_ranges, under torch.func (grad, vmap, jvp and others), for a batch of gradients.
        RuntimeError: When the machine lacks what a backend needs, and when communication fails.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from flash_attn_mini import cp_flash_attn_func, zigzag_shards
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> shards = zigzag_shards(100, dist.group.WORLD)
        >>> q, k, v = (shards.split(torch.randn(1, 100, 2, 16), dim=1) for _ in range(3))
        >>> cp_flash_attn_func(q, k, v, shards, causal=True).shape
        torch.Size([1, 100, 2, 16])
        >>> dist.destroy_process_group()
    """
    arguments = Arguments(
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        learnable_sink,
        key_ranges,
    )
    result: Result = _call("cp_flash_attn_func", False, q, k, v, shards, arguments, strategy, backend)
    return result


def cp_flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shards: Shards,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    strategy: str = "auto",
    learnable_sink: torch.Tensor | None = None,
    key_ranges: None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`flash_attn_varlen_func` on packed documents whose tokens are spread over the ranks of a group.

    The documents' lengths are those that `packed_shards` was given. The first call with new shards copies them to the
    GPU, for which the host waits; later calls wait for nothing.

    Args:
        q: Local queries, ``[tokens_local, nheads, headdim]``.
        k: Local keys of the same tokens, ``[tokens_local, nheads_k, headdim]``.
        v: Local values, shaped like k but for their head dim.
        shards: Who owns which tokens, from `packed_shards` (or `zigzag_shards`: one document).
        alibi_slopes: float32 ``[nheads]``, or ``[documents, nheads]``.

    The other arguments and the errors are those of `cp_flash_attn_func`.

    Returns:
        out, ``[tokens_local, nheads, headdim_v]``; or with ``return_attn_probs`` also softmax_lse, ``[nheads,
        tokens_local]``, and an empty S_dmask.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from flash_attn_mini import cp_flash_attn_varlen_func, packed_shards
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> shards = packed_shards([0, 30, 30, 100], dist.group.WORLD)
        >>> q, k, v = (shards.split(torch.randn(100, 2, 16), dim=0) for _ in range(3))
        >>> cp_flash_attn_varlen_func(q, k, v, shards, causal=True).shape
        torch.Size([100, 2, 16])
        >>> dist.destroy_process_group()
    """
    arguments = Arguments(
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        learnable_sink,
        key_ranges,
    )
    result: Result = _call("cp_flash_attn_varlen_func", True, q, k, v, shards, arguments, strategy, backend)
    return result


class Choice(NamedTuple):
    """A strategy and why it was chosen."""

    strategy: str
    reason: str


def choose_strategy(attention: Attention, nheads: int, nheads_k: int) -> Choice:
    """The strategy that ``auto`` takes. It depends on what all ranks know, so that all choose the same one.

    If a step of the ring's forward computes enough for each byte of K and V that arrives during it, the messages are
    hidden, and the ring is chosen. Otherwise the choice compares the elements that a rank receives, over headdim, in a
    forward and a backward.
    """
    shards = attention.shards
    if shards.size == 1:
        return Choice(ring.NAME, "one rank")
    if not ulysses.divides(shards.size, nheads, nheads_k):
        return Choice(ring.NAME, f"{nheads} and {nheads_k} heads do not divide among {shards.size} ranks")
    keys = blocks.travelling_keys(shards, attention.mask)
    if keys.most == 0:
        return Choice(ring.NAME, "no keys travel in the ring")
    in_machine = shards.size <= transport.GPUS_OF_A_MACHINE
    enough = transport.FLOPS_OF_A_BYTE if in_machine else transport.FLOPS_OF_A_BYTE_BETWEEN_MACHINES
    # The work of the last step hides nothing.
    pairs = blocks.pairs_of_a_rank(shards, attention.mask) * (shards.size - 1) / shards.size
    flops_of_a_byte = (4 * nheads * pairs) / (2 * nheads_k * keys.most * 2)  # 16-bit K and V; headdim cancels out
    if flops_of_a_byte >= enough:
        steps = len(blocks.steps_of_all_ranks(shards, attention.mask))
        travel = f"keys travel in {steps} of {shards.size - 1} steps of the ring"
        return Choice(ring.NAME, f"{travel}, with {flops_of_a_byte:,.0f} FLOPs for each byte; {enough:,.0f} hide it")
    by_ring = 6 * keys.mean * nheads_k  # K and V twice, dK and dV once
    by_ulysses = 2 * ulysses.travelling_elements(shards.starts[-1], shards.size, nheads, nheads_k)
    compared = (
        f"a rank receives {by_ring * 1e-6:.3g} M elements x headdim in the ring, {by_ulysses * 1e-6:.3g} M in ulysses"
    )
    return Choice(ulysses.NAME if by_ulysses < ULYSSES_SHARE * by_ring else ring.NAME, compared)


def _call(
    name: str,
    is_packed: bool,
    q: Any,
    k: Any,
    v: Any,
    shards: Any,
    arguments: Arguments,
    strategy: Any,
    backend: Any,
) -> Any:
    """Both public functions."""
    if torch.compiler.is_compiling():  # here, because the decorator makes the import of this package take two seconds
        return torch.compiler.disable(_call)(name, is_packed, q, k, v, shards, arguments, strategy, backend)
    if not isinstance(shards, Shards):
        raise wrong_type("shards", shards, "what zigzag_shards or packed_shards returns")
    with checks.shared_errors(name, shards.group):
        checks.refuse_transforms(name, q, k, v)
        attention = _checked(name, is_packed, q, k, v, shards, arguments, strategy, backend)
    q, k, v = (autocast(x) for x in (q, k, v))
    if checks.compares_ranks():
        checks.compare_ranks(name, shards.group, _description(attention, q, k, v, arguments, strategy))
    headdim_v, headdim = v.shape[-1], max(q.shape[-1], v.shape[-1])
    q, k, v = (_with_headdim(x, headdim) for x in (q, k, v))  # K and V travel in one tensor
    choice = Choice(strategy, "asked for")
    if strategy == "auto":
        choice = choose_strategy(attention, q.shape[-2], k.shape[-2])
    if tracing.enabled():
        tracing.trace(name, q=q, k=k, shards=shards, strategy=choice.strategy, reason=choice.reason)
    returns_lse = bool(arguments.return_attn_probs)
    needs_lse = returns_lse or modifies_rows(attention.options)

    def forward(options: Options) -> tuple[torch.Tensor, torch.Tensor]:
        out, softmax_lse = _ContextParallelAttention.apply(
            attention._replace(options=options), choice.strategy, needs_lse, q, k, v
        )
        return out, softmax_lse

    out, softmax_lse = with_modified_rows(forward, attention.options)
    out = out if headdim == headdim_v else out[..., :headdim_v]
    return (out, softmax_lse, q.new_empty(0)) if returns_lse else out


def _with_headdim(x: torch.Tensor, headdim: int) -> torch.Tensor:
    """x with zeros appended to its last dimension; they change no score."""
    if x.shape[-1] == headdim:
        return x
    return torch.nn.functional.pad(x, (0, headdim - x.shape[-1])).contiguous()  # pad keeps a channels_last format


def _checked(
    name: str,
    is_packed: bool,
    q: Any,
    k: Any,
    v: Any,
    shards: Shards,
    arguments: Arguments,
    strategy: Any,
    backend: Any,
) -> Attention:
    """Check every argument on this rank."""
    if strategy not in STRATEGIES:
        raise ValueError(f"flash_attn_mini: strategy is {strategy!r}; allowed: {', '.join(STRATEGIES)}")
    for tensor_name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, torch.Tensor) and type(x) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(
                f"flash_attn_mini: {tensor_name} is a {type(x).__name__}; allowed: a plain torch.Tensor with the local "
                "rows (of a DTensor: to_local())"
            )
    named = arguments._asdict()
    as_flag("return_attn_probs", named.pop("return_attn_probs"))
    if named["key_ranges"] is not None:
        raise NotImplementedError(
            f"flash_attn_mini: {name} does not implement key_ranges; allowed: None. Available: documents as "
            "packed_shards with cp_flash_attn_varlen_func, causal, window_size, flash_attn_func on the whole sequence"
        )
    options = checked_options(q, k, v, 0.0, **named, backend=backend)
    chosen = select_backend(q.device, options.backend, max(x.shape[-1] if x.ndim else 0 for x in (q, v)))
    options = options._replace(backend=None if chosen is REFERENCE else chosen.name)  # no call can name the reference
    slopes = options.alibi_slopes
    if is_packed:
        documents = len(shards.starts) - 1
        if slopes is not None and slopes.ndim == 2:
            if slopes.shape[0] != documents:
                raise ValueError(
                    f"flash_attn_mini: alibi_slopes has shape {list(slopes.shape)}; allowed: [nheads] or "
                    f"[documents, nheads] with {documents} documents"
                )
            slopes = None if documents == 0 else slopes[0]
    elif len(shards.starts) != 2:
        raise ValueError(
            f"flash_attn_mini: shards are of {len(shards.starts) - 1} packed documents; allowed: those of "
            "zigzag_shards (packed documents: cp_flash_attn_varlen_func)"
        )
    rows_dim, rank = (0, 3) if is_packed else (1, 4)
    for tensor_name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim == rank and x.shape[rows_dim] != shards.tokens[shards.rank]:
            raise ValueError(
                f"flash_attn_mini: {tensor_name} has {x.shape[rows_dim]} tokens; allowed: those of this rank, "
                f"{shards.tokens[shards.rank]} ({shards!r})"
            )
    sequences = _local_sequence(shards, q.device) if is_packed else None
    of_checks = options._replace(alibi_slopes=slopes)
    if extension.MODULE is None:
        triton_checks.check_forward(q, k, v, sequences, of_checks, chosen.name)
    else:
        extension.check_forward(q, k, v, sequences, of_checks)
    if strategy == ulysses.NAME and not ulysses.divides(shards.size, q.shape[-2], k.shape[-2]):
        raise ValueError(
            f"flash_attn_mini: strategy is 'ulysses', for {q.shape[-2]} heads of q and {k.shape[-2]} of k; allowed: "
            f"multiples of the group's {shards.size} ranks"
        )
    transport.check_backend(shards.group, q.device)
    return Attention(name, shards, options, is_packed)


def _local_sequence(shards: Shards, device: torch.device) -> Sequences:
    """All local tokens as one sequence, for the checks of the varlen functions."""

    def build() -> Sequences:
        tokens = shards.tokens[shards.rank]
        cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device="cpu").to(device)
        return Sequences(cu_seqlens, cu_seqlens, tokens, tokens)

    return kept(shards.plans, ("local", device), build)  # the copy to a GPU waits for it


def _description(
    attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: Arguments, strategy: str
) -> dict[str, str]:
    """What has to be the same on every rank, in words."""
    rows_dim = q.ndim - 3
    shapes = [[*x.shape[:rows_dim], "tokens", *x.shape[rows_dim + 1 :]] for x in (q, k, v)]
    needs = [name for name, x in zip("qkv", (q, k, v), strict=True) if torch.is_grad_enabled() and x.requires_grad]
    options = attention.options._asdict()
    tensors = {name: options.pop(name) for name in list(options) if name in TENSOR_OPTIONS}
    return {
        "shape of q": str(shapes[0]),
        "shape of k": str(shapes[1]),
        "shape of v": str(shapes[2]),
        "dtype": str(q.dtype),
        "device": q.device.type,
        "strategy": strategy,
        "options": str(options),
        **{name: "None" if x is None else str(x.tolist()) for name, x in tensors.items()},
        "return_attn_probs": str(bool(arguments.return_attn_probs)),
        "tensors with a gradient": str(needs),
        "shards": attention.shards.description,
    }


class _ContextParallelAttention(torch.autograd.Function):
    """Attention with one of the strategies. The log-sum-exp is empty if ulysses need not return it."""

    @staticmethod
    def forward(
        ctx: Any,
        attention: Attention,
        strategy: str,
        returns_lse: bool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slopes = attention.options.alibi_slopes
        if strategy == ulysses.NAME:
            out, lse, saved = ulysses.forward(attention, q, k, v, returns_lse)
            ctx.save_for_backward(slopes, *saved)
        else:
            out, lse = (ring if strategy == ring.NAME else all_gather).forward(attention, q, k, v)
            ctx.save_for_backward(slopes, q, k, v, out, lse)
        ctx.attention = attention._replace(options=attention.options._replace(alibi_slopes=None))
        ctx.strategy = strategy
        ctx.shape, ctx.nheads_k, ctx.returns_lse = q.shape, k.shape[-2], returns_lse
        ctx.set_materialize_grads(False)
        if not returns_lse:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        checks.refuse_second_derivative(ctx.attention.name)
        checks.refuse_transforms(f"the backward of {ctx.attention.name}", dout, dlse)
        wanted = ctx.needs_input_grad[3:]
        slopes, *saved = ctx.saved_tensors
        options = ctx.attention.options._replace(alibi_slopes=slopes)
        if torch.are_deterministic_algorithms_enabled():
            options = options._replace(deterministic=True)
        attention: Attention = ctx.attention._replace(options=options)
        if dout is None:
            dout = saved[0].new_zeros(ctx.shape)
        if ctx.strategy == ulysses.NAME:
            saved_heads = ulysses.Saved(saved)
            gradients = ulysses.backward(
                attention, dout, dlse, ctx.returns_lse, saved_heads, dout, ctx.nheads_k, wanted
            )
        else:
            strategy = ring if ctx.strategy == ring.NAME else all_gather
            q, k, v, out, lse = saved
            gradients = strategy.backward(attention, BackwardInputs(dout, q, k, v, out, lse, dlse, wanted))
        return None, None, None, *gradients
