"""The compiled extension ``flash_attn_mini._C``: the only file that spells out the official argument order.

Other files pass `Sequences` (None for sequences of equal length), `KvCache` and `Options` whole.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from ..namespace import INSTALLED, MAY_HAVE_EXTENSION, PACKAGE
from ..options import NUM_OFFICIAL_OPTIONS, KvCache, Options, Sequences
from ..schemas import EQUAL_LENGTHS

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

MODULE: ModuleType | None = None  # None: not built, or it does not load
IS_BUILT = True
_error: str | None = None

_HOW_TO_BUILD = (
    "with a C++ compiler, and nvcc or the wheel flash_attn_mini_kernels for CUDA kernels, build it with: pip install ."
)

if MAY_HAVE_EXTENSION:
    try:
        MODULE = importlib.import_module(f"{INSTALLED}._C")
    except ModuleNotFoundError as error:
        IS_BUILT = False
        _error = f"the extension flash_attn_mini._C is not built ({error}); {_HOW_TO_BUILD}"
    except ImportError as error:
        _kernels = "install the flash_attn_mini_kernels that it was built against, or "
        _remedy = _kernels if "flash_attn_mini_kernels" in str(error).lower() else ""
        _error = (
            f"the extension flash_attn_mini._C does not load ({error}); {_remedy}build it again with: pip install ."
        )
else:  # its ops have the namespace of the installed package
    IS_BUILT = False
    _error = f"this copy of the package, imported as {PACKAGE}, has no compiled extension; {INSTALLED} may have one"


def missing_reason() -> str | None:
    """None when the extension is loaded, else why not and what to do."""
    return _error


def load() -> ModuleType:
    """The extension module.

    Raises:
        RuntimeError: If it is not built or does not load.
    """
    if MODULE is None:
        raise RuntimeError(f"flash_attn_mini: {_error}")
    return MODULE


@contextlib.contextmanager
def reserved_sms(count: int) -> Iterator[None]:
    """A context in which the Hopper forwards of this thread leave ``count`` SMs to kernels of other streams.

    A forward has a CTA on each SM until it ends, so a kernel of another stream waits unless some SMs are left free.
    Kernels that split the keys of a KV cache do not read the number. Without the extension the context does nothing.
    """
    if MODULE is None:
        yield
        return
    before = load().reserve_sms(count)
    try:
        yield
    finally:
        load().reserve_sms(before)


def _scalars(options: Options, *zero_tensors: bool) -> tuple[Any, ...]:
    """The scalars in the official order; the varlen functions have zero_tensors among them."""
    dropout_p, softmax_scale, causal, left, right, softcap, *_ = options
    return dropout_p, softmax_scale, *zero_tensors, causal, left, right, softcap


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences | None, options: Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """``_C.fwd``, or ``_C.varlen_fwd`` with sequences: out, softmax_lse, rng_state and max_logits, or None for them."""
    out = seqused_k = leftpad_k = generator = None
    return_softmax = False
    end = (return_softmax, generator, options.deterministic, *options[NUM_OFFICIAL_OPTIONS:])
    if sequences is None:
        results = load().fwd(q, k, v, out, options.alibi_slopes, *_scalars(options), *end)
    else:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table = sequences
        lengths = (cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table)
        longest = (max_seqlen_q, max_seqlen_k)
        zero_tensors = False
        results = load().varlen_fwd(
            q, k, v, out, *lengths, options.alibi_slopes, *longest, *_scalars(options, zero_tensors), *end
        )
    return results[0], results[1], results[3], results[4] if options.return_max_logits else None


def check_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences | None, options: Options
) -> None:
    """Run only the checks of a forward, for the backend that the options name."""
    load().check_fwd(q, k, v, *(sequences or EQUAL_LENGTHS), *options, None)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None,
    sequences: Sequences | None,
    options: Options,
    rng_state: torch.Tensor | None,
    output_mask: Sequence[bool],
    into: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """``_C.bwd``, or ``_C.varlen_bwd`` with sequences, which write to ``into``: dq, dk, dv and softmax_d."""
    tensors = (dout, q, k, v, out, softmax_lse, *into)
    generator = None
    deterministic = options.deterministic or torch.are_deterministic_algorithms_enabled()
    end = (deterministic, generator, rng_state, dsoftmax_lse, output_mask, *options[NUM_OFFICIAL_OPTIONS:])
    if sequences is None:
        dq, dk, dv, softmax_d = load().bwd(*tensors, options.alibi_slopes, *_scalars(options), *end)
    else:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, _ = sequences
        zero_tensors = False
        lengths, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        dq, dk, dv, softmax_d = load().varlen_bwd(
            *tensors, *lengths, options.alibi_slopes, *longest, *_scalars(options, zero_tensors), *end
        )
    return dq, dk, dv, softmax_d


def forward_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cache: KvCache, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """``_C.fwd_kvcache``: the official arguments in the official order, then four of ours: out and softmax_lse."""
    out = None
    result, softmax_lse = load().fwd_kvcache(
        q,
        k_cache,
        v_cache,
        cache.k,
        cache.v,
        cache.cache_seqlens,
        cache.rotary_cos,
        cache.rotary_sin,
        cache.cache_batch_idx,
        cache.cache_leftpad,
        cache.block_table,
        options.alibi_slopes,
        out,
        options.softmax_scale,
        options.causal,
        options.window_size_left,
        options.window_size_right,
        options.softcap,
        cache.rotary_interleaved,
        cache.num_splits,
        cache.split_keys,
        cache.cache_seqlen,
        *options[NUM_OFFICIAL_OPTIONS:],
    )
    return result, softmax_lse
