"""Strategy ``ulysses``: an all-to-all gives every rank all tokens of some heads, and another one gives the rows back.

Each head is computed whole by one rank, so the results have the bits of one GPU, and nothing is merged or summed. The
heads of a rank are split in groups: while one group is computed, the next arrives and the results of the last one are
sent. After "DeepSpeed Ulysses" (Jacobs et al., 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from .. import ops
from ..options import Options, Sequences
from . import transport
from .all_gather import tokens_first
from .kernels import Attention, sums_dtype
from .ring import ThreeTensors
from .shards import kept

NAME = "ulysses"
MOST_GROUPS = 4  # of heads; the first to arrive and the last to leave are not hidden behind work
LEAST_ROWS = 1 << 15  # query rows x heads in a group: enough tiles of 128 rows for every SM


@dataclass
class Saved:
    """What the backward reads: q, k, v, out and log-sum-exp of every group of heads, all tokens in global order."""

    tensors: list[torch.Tensor]

    def of_group(self, group: int) -> list[torch.Tensor]:
        return self.tensors[5 * group : 5 * group + 5]


def divides(shards_size: int, nheads: int, nheads_k: int) -> bool:
    """Whether the heads divide evenly among the ranks."""
    return nheads % shards_size == 0 and nheads_k % shards_size == 0


def forward(
    attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, returns_lse: bool
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """out and log-sum-exp of the local queries, and what the backward reads. Without returns_lse, the log-sum-exp is
    empty.
    """
    size, groups = attention.shards.size, _number_of_groups(attention, q, k)
    qkv = [_by_rank_and_group(tokens_first(x), size, groups) for x in (q, k, v)]
    arriving = [_scatter_heads(attention, "forward", group, [x[group] for x in qkv]) for group in range(groups)]
    saved: list[torch.Tensor] = []
    leaving: list[list[transport.Message]] = []
    for group, message in enumerate(arriving):
        tensors = _split_heads(_arrived(attention, message), [x[group].shape[-2] for x in qkv])
        options, sequences = _options_of(attention, group, groups, q), _sequences(attention, q)
        out, lse, *_ = ops.forward(*tensors, sequences, options)
        saved += [*tensors, out, lse]
        results = [tokens_first(out)]
        if returns_lse:
            results.append(_rows_of_lse(lse))
        leaving.append([_gather_heads(attention, "forward", group, x) for x in results])
    out = _returned(attention, [messages[0] for messages in leaving], q)
    lse_local = q.new_empty(0, dtype=sums_dtype(q))
    if returns_lse:
        lse_local = _lse_of_rows(_joined([messages[1] for messages in leaving], attention), attention.is_packed)
    return out, lse_local, saved


def backward(
    attention: Attention,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    returned_lse: bool,
    saved: Saved,
    q_like: torch.Tensor,
    nheads_k: int,
    wanted: Sequence[bool],
) -> ThreeTensors:
    """dq, dk and dv of the local tensors, None for those not wanted.

    The messages depend only on what all ranks share. A loss may use the log-sum-exp on some ranks only, so if the
    forward returned it, its gradient travels from every rank, zeros where there is none.
    """
    size = attention.shards.size
    if returned_lse and dlse is None:
        dlse = dout.new_zeros(dout[..., 0].transpose(-1, -2).shape, dtype=sums_dtype(dout))
    groups = len(saved.tensors) // 5
    douts = _by_rank_and_group(tokens_first(dout), size, groups)
    dlses = None if dlse is None else _by_rank_and_group(_rows_of_lse(dlse)[..., None], size, groups)
    arriving = []
    for group in range(groups):
        messages = [_scatter_heads(attention, "backward", group, [douts[group]])]
        if dlses is not None:
            messages.append(_scatter_heads(attention, "backward", group, [dlses[group]]))
        arriving.append(messages)
    leaving: list[list[transport.Message | None]] = []
    for group, messages in enumerate(arriving):
        dout_group = _to_layout(_arrived(attention, messages[0]), attention.is_packed)
        dlse_group = None
        if dlses is not None:
            dlse_group = _lse_of_rows(_arrived(attention, messages[1])[..., 0], attention.is_packed)
        q, k, v, out, lse = saved.of_group(group)
        options, sequences = _options_of(attention, group, groups, q), _sequences(attention, q)
        tensors = (dout_group, q, k, v, out, lse, dlse_group)
        gradients = ops.backward(*tensors, sequences, options, None, wanted)[:3]
        leaving.append(
            [
                _gather_heads(attention, "backward", group, tokens_first(x)) if is_wanted else None
                for x, is_wanted in zip(gradients, wanted, strict=True)
            ]
        )
    results: list[torch.Tensor | None] = []
    for i, is_wanted in enumerate(wanted):
        like = q_like if i == 0 else q_like[..., :nheads_k, :]
        messages_of = [messages[i] for messages in leaving]
        results.append(_returned(attention, [x for x in messages_of if x is not None], like) if is_wanted else None)
    return results[0], results[1], results[2]


def _number_of_groups(attention: Attention, q: torch.Tensor, k: torch.Tensor) -> int:
    """A divisor of the key heads of a rank, so that a group has whole groups of query heads."""
    shards = attention.shards
    batch = 1 if attention.is_packed else q.shape[0]
    rows = shards.starts[-1] * batch * q.shape[-2] // shards.size
    most = max(1, min(MOST_GROUPS, rows // LEAST_ROWS))
    heads = k.shape[-2] // shards.size
    return max(number for number in range(1, most + 1) if heads % number == 0)


def _by_rank_and_group(x: torch.Tensor, size: int, groups: int) -> list[torch.Tensor]:
    """``[tokens, ..., heads, d]`` as one ``[tokens, ..., size, heads / (size groups), d]`` for each group of heads."""
    return list(x.unflatten(-2, (size, groups, -1)).unbind(-3))


def _scatter_heads(attention: Attention, direction: str, group: int, tensors: list[torch.Tensor]) -> transport.Message:
    """Start to send each rank its heads of one group; tensors ``[tokens, ..., size, heads, d]``."""
    shards = attention.shards
    x = torch.cat(tensors, -2).movedim(-3, 0).flatten(0, 1)  # [size tokens, ..., heads, d]
    mine = shards.tokens[shards.rank]
    where = attention.where(NAME, direction, f"heads of group {group} to their ranks")
    return transport.all_to_all_rows(x, [mine] * shards.size, shards.tokens, shards.group, where)


def _arrived(attention: Attention, message: transport.Message) -> torch.Tensor:
    """What arrived, ``[tokens of all ranks, ..., heads, d]``, in global order."""
    return attention.shards.to_global(message.wait()[0])


def _split_heads(x: torch.Tensor, heads: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v from one tensor ``[tokens, (batch,) heads, headdim]``, in the layout of the kernels."""
    q, k, v = _to_layout(x, x.ndim == 3).split(heads, -2)
    return q, k, v


def _to_layout(x: torch.Tensor, is_packed: bool) -> torch.Tensor:
    return x if is_packed else x.transpose(0, 1)


def _rows_of_lse(lse: torch.Tensor) -> torch.Tensor:
    """``[(batch,) heads, tokens]`` as ``[tokens, (batch,) heads]``."""
    return lse.movedim(-1, 0)


def _lse_of_rows(x: torch.Tensor, is_packed: bool) -> torch.Tensor:
    """``[tokens, (batch,) heads]`` as ``[(batch,) heads, tokens]``."""
    return x.movedim(0, -1).contiguous()


def _gather_heads(attention: Attention, direction: str, group: int, x: torch.Tensor) -> transport.Message:
    """Start to send each rank its rows of the heads computed here; ``x`` is in global order, tokens first."""
    shards = attention.shards
    mine = shards.tokens[shards.rank]
    where = attention.where(NAME, direction, f"results of group {group} to the ranks of their tokens")
    return transport.all_to_all_rows(shards.to_ranks(x), shards.tokens, [mine] * shards.size, shards.group, where)


def _joined(messages: list[transport.Message], attention: Attention) -> torch.Tensor:
    """Rows of all heads, ``[tokens_local, (batch,) heads, ...]``, from the messages of all groups."""
    size = attention.shards.size
    heads_dim = 1 if attention.is_packed else 2  # after the tokens, and the batch
    parts = [x.unflatten(0, (size, x.shape[0] // size)) for x in (message.wait()[0] for message in messages)]
    by_group = torch.stack(parts, 1)  # [size, groups, tokens_local, (batch,) heads, ...]
    heads_first = by_group.movedim((0, 1), (heads_dim, heads_dim + 1))
    return heads_first.flatten(heads_dim, heads_dim + 2)


def _returned(attention: Attention, messages: list[transport.Message], like: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of the shape of ``like`` from the messages of all groups."""
    joined = _joined(messages, attention)
    return _to_layout(joined, attention.is_packed).contiguous().view(like.shape)


def _options_of(attention: Attention, group: int, groups: int, q: torch.Tensor) -> Options:
    """The options with the slopes of the heads of a group."""
    options, shards = attention.options, attention.shards
    if options.alibi_slopes is None:
        return options
    slopes = options.alibi_slopes
    heads = slopes.shape[-1] // (shards.size * groups)
    first = (shards.rank * groups + group) * heads
    return options._replace(alibi_slopes=slopes[..., first : first + heads].contiguous())


def _sequences(attention: Attention, q: torch.Tensor) -> Sequences | None:
    """The documents of a packed tensor in global order."""
    if not attention.is_packed:
        return None
    starts = attention.shards.starts

    def build() -> Sequences:
        cu_seqlens = torch.tensor(starts, dtype=torch.int32, device="cpu").to(q.device)
        longest = max((stop - start for start, stop in pairwise(starts)), default=0)
        return Sequences(cu_seqlens, cu_seqlens, longest, longest)

    return kept(attention.shards.plans, ("documents", q.device), build)


def travelling_elements(tokens: int, size: int, nheads: int, nheads_k: int) -> float:
    """Elements of q, k, v and out (in the backward: dq, dk, dv and dout) that a rank receives, over headdim."""
    return tokens * (size - 1) / size / size * (2 * nheads + 2 * nheads_k)
