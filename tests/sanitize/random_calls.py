"""Random calls of the extension on CPU tensors, half of them changed into calls that are mostly wrong.

  python -m tests.sanitize.random_calls --count 2000 --seed 7

Tensors have strides of 0 and 1, overlap, and begin at any offset. A wrong call has another dtype, shape, stride or
length, hostile numbers in an index tensor, or an option out of range. Each call must return or raise ValueError,
TypeError or NotImplementedError. Under a sanitizer (sanitize_cpu.py) no call may touch memory that is not its own.
Each line names a call before it runs, so that the last line names the one that ended the process.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn_mini import _C

Call = dict[str, Any]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NAMED = (ValueError, TypeError, NotImplementedError)
HOSTILE = (-(2**31), -1, 0, 1, 2**16, 2**31 - 1)
OUT_OF_RANGE = (-math.inf, -1e30, -1.0, 0.0, 1e-30, 1.0, 1e30, math.inf, math.nan)


def tensor(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype, *, may_overlap: bool = True) -> Tensor:
    """Random values with the last dimension contiguous; exactly as much memory as the tensor reaches."""
    kind = draw.choice(("dense", "permuted", "gaps", "any" if may_overlap else "dense"))
    strides, step = [1] * len(shape), 1
    order = list(range(len(shape) - 1))
    if kind == "permuted":
        draw.shuffle(order)
    for dim in (len(shape) - 1, *reversed(order)):
        strides[dim] = step
        step = max(step * shape[dim], 1) + (draw.randint(0, 9) if kind == "gaps" else 0)
    if kind == "any":
        strides = [*(draw.choice((0, 1, 2, shape[-1], 3 * shape[-1])) for _ in shape[:-1]), 1]
    offset = draw.choice((0, 0, 1, 7))
    reach = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = torch.randn(max(reach, offset), dtype=torch.float32).to(dtype)
    return memory.as_strided(shape, strides, offset) if 0 not in shape else torch.empty(shape, dtype=dtype)


def integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def sizes(draw: random.Random) -> tuple[int, int, int]:
    """nheads, nheads_k, headdim."""
    nheads_k = draw.randint(1, 3)
    return nheads_k * draw.randint(1, 3), nheads_k, draw.choice((1, 8, 16, 33, 64, 100, 128, 256))


def length(draw: random.Random) -> int:
    return draw.choice((0, 1, draw.randint(1, 20), draw.randint(1, 150)))


def options(draw: random.Random, nheads: int, batch: int) -> Call:
    slopes = draw.choice((None, None, (nheads,), (batch, nheads)))
    return {
        "alibi_slopes": None if slopes is None else torch.rand(slopes),
        "softmax_scale": draw.choice((0.1, 0.1, -0.2, 0.0)),
        "is_causal": draw.random() < 0.4,
        "window_size_left": draw.choice((-1, -1, 0, draw.randint(1, 200))),
        "window_size_right": draw.choice((-1, -1, 0, draw.randint(1, 200))),
        "softcap": draw.choice((0.0, 0.0, 5.0)),
    }


def key_ranges(draw: random.Random, *leading: tuple[int, ...], keys: int) -> Tensor | None:
    """One or two ranges, of which some values lie outside of the keys; each leading size is one of a choice."""
    if draw.random() < 0.7:
        return None
    shape = (*(draw.choice(sizes) for sizes in leading), *draw.choice(((2,), (2, 2))))
    ranges = torch.randint(-3, keys + 4, shape, dtype=torch.int32)
    return torch.where(torch.rand(shape) < 0.1, integers([draw.choice(HOSTILE)]), ranges)


def attn_bias(draw: random.Random, dtype: torch.dtype, *full: int) -> Tensor | None:
    """Numbers or bools of any strides; each size but the last is 1 or that of `full`."""
    if draw.random() < 0.7:
        return None
    shape = (*(draw.choice((1, n)) for n in full[:-1]), full[-1])
    wide = torch.promote_types(dtype, torch.float32)
    bias = tensor(draw, shape, draw.choice((dtype, wide, torch.bool)))
    return tensor(draw, (*shape, 2), bias.dtype)[..., 1] if draw.random() < 0.2 else bias


def with_dropout(draw: random.Random, call: Call) -> Call:
    p = draw.choice((0.0, 0.0, 0.3)) if call["softcap"] == 0.0 else 0.0
    return {**call, "p_dropout": p}


def written(draw: random.Random, like: Tensor) -> Tensor | None:
    return draw.choice((None, tensor(draw, tuple(like.shape), like.dtype, may_overlap=False)))


def cumulative(lengths: list[int]) -> Tensor:
    return integers([sum(lengths[:i]) for i in range(len(lengths) + 1)])


def dense(draw: random.Random) -> Call:
    dtype, batch = draw.choice(DTYPES), draw.choice((0, 1, 2, 3))
    nheads, nheads_k, headdim = sizes(draw)
    q = tensor(draw, (batch, length(draw), nheads, headdim), dtype)
    seqlen_k = length(draw)
    k, v = (tensor(draw, (batch, seqlen_k, nheads_k, headdim), dtype) for _ in range(2))
    call = with_dropout(draw, options(draw, nheads, batch))
    call["key_ranges"] = key_ranges(draw, (1, batch), (1, nheads), (q.shape[1],), keys=seqlen_k)
    call["attn_bias"] = attn_bias(draw, dtype, batch, nheads, q.shape[1], seqlen_k)
    return {"q": q, "k": k, "v": v, "out": written(draw, q), **call, "return_softmax": draw.random() < 0.3}


def varlen(draw: random.Random) -> Call:
    dtype, batch = draw.choice(DTYPES), draw.randint(0, 4)
    nheads, nheads_k, headdim = sizes(draw)
    lengths_q, lengths_k = ([length(draw) for _ in range(batch)] for _ in range(2))
    q = tensor(draw, (sum(lengths_q), nheads, headdim), dtype)
    call = {"q": q, "out": written(draw, q), "cu_seqlens_q": cumulative(lengths_q)}
    call["cu_seqlens_k"], call["block_table"] = cumulative(lengths_k), None
    shape: tuple[int, ...] = (sum(lengths_k), nheads_k, headdim)
    if draw.random() < 0.3:
        page_size, pages = draw.choice((1, 7, 16)), draw.randint(1, 9)
        columns = max([-(-n // page_size) for n in lengths_k], default=0)
        shape = (pages, page_size, nheads_k, headdim)
        call["block_table"] = torch.randint(pages, (batch, columns), dtype=torch.int32)
    call["k"], call["v"] = (tensor(draw, shape, dtype) for _ in range(2))
    call |= {"max_seqlen_q": max(lengths_q, default=0), "max_seqlen_k": max(lengths_k, default=0)}
    call |= with_dropout(draw, options(draw, nheads, batch))
    if call["block_table"] is None:
        call["key_ranges"] = key_ranges(draw, (1, nheads), (sum(lengths_q),), keys=call["max_seqlen_k"])
    return {**call, "zero_tensors": draw.random() < 0.1, "return_softmax": draw.random() < 0.3}


def backward_of(draw: random.Random, call: Call, forward: Callable[..., Any]) -> Call:
    """The backward of a valid call."""
    out, lse, _, rng_state = forward(**call)
    call = {name: x for name, x in call.items() if name not in ("return_softmax", "block_table")}
    call |= {f"d{name}": written(draw, call[name]) for name in ("q", "k", "v")}
    call |= {"dout": tensor(draw, tuple(out.shape), out.dtype), "out": out, "softmax_lse": lse, "rng_state": rng_state}
    call |= {"deterministic": draw.random() < 0.5, "dsoftmax_lse": draw.choice((None, torch.randn_like(lse)))}
    return {**call, "output_mask": [draw.random() < 0.8 for _ in range(3)]}


def kvcache(draw: random.Random) -> Call:
    dtype, batch = draw.choice(DTYPES), draw.randint(0, 3)
    nheads, nheads_k, headdim = sizes(draw)
    seqlen_q, seqlen_new = length(draw), draw.choice((None, 0, 1, draw.randint(1, 20)))
    new = seqlen_new or 0
    is_paged, page_size = draw.random() < 0.4, draw.choice((1, 5, 16))
    columns = draw.randint(-(-new // page_size), 30)
    capacity = columns * page_size if is_paged else new + length(draw)
    rows = batch * columns + draw.randint(0, 2) if is_paged else batch + draw.randint(0, 2)
    shape = (rows, page_size if is_paged else capacity, nheads_k, headdim)
    lengths = [draw.randint(0, capacity - new) for _ in range(batch)]
    call: Call = {
        "q": tensor(draw, (batch, seqlen_q, nheads, headdim), dtype),
        "kcache": tensor(draw, shape, dtype, may_overlap=seqlen_new is None),
        "vcache": tensor(draw, shape, dtype, may_overlap=seqlen_new is None),
        "k": None,
        "v": None,
        "seqlens_k": integers(lengths),
        "rotary_cos": None,
        "rotary_sin": None,
        "cache_batch_idx": None,
        "leftpad_k": None,
        "block_table": None,
        **options(draw, nheads, batch),
        "is_rotary_interleaved": draw.random() < 0.5,
        "num_splits": draw.choice((0, 0, 1, 3)),
    }
    call["out"] = written(draw, call["q"])
    if call["num_splits"] == 0:
        call["split_keys"] = draw.choice((0, 0, 16, 50))
    if seqlen_new is not None:
        call["k"], call["v"] = (tensor(draw, (batch, seqlen_new, nheads_k, headdim), dtype) for _ in range(2))
        if headdim >= 16 and draw.random() < 0.5:
            rotary_dim = 16 * draw.randint(1, headdim // 16)
            positions = capacity + seqlen_q
            call["rotary_cos"], call["rotary_sin"] = torch.randn(2, positions, rotary_dim // 2).to(dtype)
    if is_paged:
        call["block_table"] = torch.randperm(rows)[: batch * columns].int().view(batch, columns)
    elif draw.random() < 0.5:
        call["cache_batch_idx"] = torch.randperm(rows)[:batch].int()
    if draw.random() < 0.3:
        call["leftpad_k"] = integers([draw.randint(0, n + new) for n in lengths])
    return call


# ---- calls that are mostly wrong ------------------------------------------------------------------------------------


def other_tensor(draw: random.Random, x: Tensor, call: Call) -> Any:
    """Another dtype, shape, stride, length or place, or other numbers."""
    kind = draw.choice(
        ("numbers", "numbers", "dtype", "shape", "spread", "expand", "other", "none", "flat", "negative")
    )
    if kind == "numbers" and not x.is_floating_point():
        changed = x.clone()
        for _ in range(draw.randint(1, 3)):
            if changed.numel() > 0:
                changed.view(-1)[draw.randrange(changed.numel())] = draw.choice(HOSTILE)
        return changed
    if kind == "dtype":
        return x.to(draw.choice((*DTYPES, torch.int32, torch.int64)))
    if kind == "shape":
        shape = list(x.shape)
        shape[draw.randrange(len(shape))] = draw.choice((0, 1, 2, 300))
        return torch.zeros(shape, dtype=x.dtype)
    if kind == "spread":
        return torch.zeros((*x.shape, 2), dtype=x.dtype)[..., 0].copy_(x)
    if kind == "expand":
        return x[:1].expand(x.shape) if x.shape[0] > 0 else x
    if kind == "other":
        return draw.choice([y for y in call.values() if isinstance(y, Tensor)])
    if kind == "flat":
        return x.flatten()
    if kind == "negative":
        return torch._neg_view(x) if x.is_floating_point() else -x
    return None if kind == "none" else x


def changed(draw: random.Random, call: Call) -> Call:
    call = dict(call)
    for _ in range(draw.choice((1, 1, 2))):
        name = draw.choice(list(call))
        value = call[name]
        if isinstance(value, Tensor):
            call[name] = other_tensor(draw, value, call)
        elif isinstance(value, bool):
            call[name] = not value
        elif isinstance(value, int):
            call[name] = draw.choice((*HOSTILE, value + 1, value - 1))
        elif isinstance(value, float):
            call[name] = draw.choice(OUT_OF_RANGE)
        elif value is None:
            call[name] = draw.choice([y for y in call.values() if isinstance(y, Tensor)])
    return call


OFFICIAL: dict[str, Call] = {
    "fwd": {"generator": None},
    "varlen_fwd": {"generator": None, "seqused_k": None, "leftpad_k": None},
    "bwd": {"generator": None},
    "varlen_bwd": {"generator": None},
    "fwd_kvcache": {},
}


def invoke(function: str, call: Call) -> Any:
    results = getattr(_C, function)(**OFFICIAL[function], **call)
    bias = call.get("attn_bias")
    if function == "bwd" and bias is not None and bias.is_floating_point():
        tensors = [call[name] for name in ("dout", "q", "k", "v", "softmax_lse")]
        names = ("p_dropout", "softmax_scale", "is_causal", "window_size_left", "window_size_right", "softcap")
        options = [call[name] for name in (*names, "alibi_slopes", "deterministic")]
        own = (None, None, call["key_ranges"], bias)  # backend, learnable_sink
        torch.ops.flash_attn_mini.attn_bias_bwd(*tensors, results[3], *options, *own, call["rng_state"])
    return results


def random_call(draw: random.Random) -> tuple[str, Call]:
    """The name of a function of the extension, and valid arguments."""
    function = draw.choice(list(OFFICIAL))
    if function == "fwd_kvcache":
        return function, kvcache(draw)
    call = varlen(draw) if "varlen" in function else dense(draw)
    if "bwd" in function:
        forward = function.replace("bwd", "fwd")
        if "varlen" in function and call["block_table"] is not None:
            return forward, call
        return function, backward_of(draw, call, lambda **arguments: invoke(forward, arguments))
    return function, call


def described(x: Any) -> str:
    if not isinstance(x, Tensor):
        return repr(x)
    numbers = "" if x.is_floating_point() or x.numel() > 40 else f" {x.tolist()}"
    return f"{str(x.dtype)[6:]}{list(x.shape)}/{list(x.stride())}+{x.storage_offset()}{numbers}"


def run(count: int, seed: int) -> Counter[str]:
    """The number of calls of each function by what became of them."""
    outcomes: Counter[str] = Counter()
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        torch.manual_seed(draw.randrange(2**31))
        function, call = random_call(draw)
        is_valid = draw.random() < 0.5
        call = call if is_valid else changed(draw, call)
        print(f"{number} {function}", {name: described(x) for name, x in call.items()}, flush=True)
        try:
            invoke(function, call)
            outcomes["returned"] += 1
        except NAMED as error:
            if is_valid:
                raise SystemExit(f"a valid call was refused: {error}") from error
            outcomes["refused"] += 1
        except RuntimeError as error:
            if "allocate memory" not in str(error):
                raise
            outcomes["out of memory"] += 1
    return outcomes


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="calls (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the calls (default: a new one)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    outcomes = run(arguments.count, seed)
    print(f"ran {arguments.count} calls with --seed {seed}: {dict(outcomes)}", file=sys.stderr)


if __name__ == "__main__":
    main()
