"""flash_attn_mini as an attention implementation of transformers (AttentionInterface; 4.53 or later, BERT 5 or later).

    model = AutoModel.from_pretrained(path, attn_implementation=register())

`register` registers two functions under one name. transformers calls `attention_mask` once before the first layer and
`attention` in every layer. What the kernels cannot compute raises NotImplementedError; no mask is ignored. Tested with
transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..argument_checks import checked_options
from ..bert_padding import index_first_axis, index_put_first_axis
from ..flash_attn_interface import flash_attn_func, flash_attn_varlen_func
from ..kvcache import flash_attn_with_kvcache
from ..namespace import NAMESPACE
from .transformers_masks import (
    AVERAGE,
    CLOSURES_ARE_TRACED,
    Layout,
    Mask,
    Seen,
    decoding_layout_of,
    has_ranges,
    kept_by,
    layout_of,
    layout_of_drawn,
    only_hides,
    padding_of,
    ranged_layout_of,
    seen_of,
    traced_mask,
    unsupported,
    without_idle_chunks,
)
from .transformers_op import attend_to_sequences, checked

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # no transformers, or one before 5
    _active_collector = None

ATTENTION_NAME = NAMESPACE.replace("flash", "").lstrip("_")  # "attn_mini" for the installed package

# Arguments of transformers for features that this version lacks, and the names of those in error messages. Other
# arguments (position_ids, use_cache, ...) do not change the result.
_UNSUPPORTED = {
    "head_mask": "a head mask",
    "cache": "a paged cache (continuous batching)",
}


def register(name: str = ATTENTION_NAME) -> str:
    """Make `attn_implementation=name` choose flash_attn_mini in every transformers model that takes one.

    Models keep their device and dtype. The backend is chosen as for any call (`flash_attn_mini.use_backend`,
    `FLASH_ATTN_MINI_BACKEND`, else by device). Batches may be padded on either side, or hold several sequences in a row
    (`position_ids` that start again, or `cu_seq_lens_q`). Grouped heads, sliding windows, chunks, softcap and attention
    dropout come from the model's configuration; softcap with dropout is an error.
    Under a causal mask or a window, the attention output of padding is 0 and is not computed.

    Any other mask runs if each query sees one or two runs of neighbouring keys: chunks (Llama 4), a prefix that sees
    itself (PaliGemma), blocks of image tokens (Gemma 3), padding with holes under a window, documents in a mask tensor
    ``[batch, 1, seqlen_q, seqlen_k]``. Such a mask becomes the option key_ranges of `flash_attn_func`, which skips keys
    that no query sees. Chunks and padding form no seqlen_q x seqlen_k tensor. For other patterns transformers draws its
    mask, which is converted once per forward. A mask tensor that the caller gives is converted in every layer. If a
    query sees more runs, or a floating mask adds other numbers, the mask tensor becomes the option attn_bias.

    Position biases (T5) become attn_bias too, with their gradient. The batch is then not packed: padding becomes
    key_ranges, and its queries are computed.

    Generation uses transformers' caches. After the prompt, each step runs `flash_attn_with_kvcache` on the cache as it
    is, without a copy, also for batches padded on the left. A static cache gives its length as a tensor, so that no
    step waits for the GPU and a compiled model is compiled once. With a static cache on a GPU, padding elsewhere than
    on the left ends in a device-side assertion. Other caches and the CPU allow it: the keys are then packed.

    `torch.compile(model, fullgraph=True)` works without a cache, also for training and for padded or packed batches. A
    padded batch is then sorted, not packed: nothing waits for the GPU. A model without a padding mask may hold packed
    rows, so each forward waits once. A compiled program takes masks for key_ranges. Masks that only their values show
    to be others (padding with holes under a sliding window, more than two runs of keys, other numbers in a floating
    mask, before PyTorch 2.14 also unknown patterns except chunks) raise NotImplementedError when the program runs, and
    end in a device-side assertion on a GPU.

    Attention sinks (`s_aux`, gpt-oss) get their gradient. The model's forward raises NotImplementedError for
    `output_attentions=True`. Before transformers 5, some models (GPT-2) do not pass `output_attentions` on: they return
    None for each layer instead.

    Some models compute attention in their own code and take no attention implementation. Bloom's forward raises
    NotImplementedError. For Falcon transformers raises KeyError when the model is made.

    Args:
        name: The name to register. It may not contain "flash": transformers reserves such names for its own kernels.

    Returns:
        `name`, for `from_pretrained(path, attn_implementation=register())`.

    Raises:
        ImportError: If transformers is missing, or older than 4.53.
        ValueError: If `name` contains "flash".

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from flash_attn_mini.integrations.transformers import register
        >>> config = BertConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=1, intermediate_size=64,
        ...                     attn_implementation=register())
        >>> tokens = torch.tensor([[101, 7592, 102], [101, 102, 0]])
        >>> hidden = BertModel(config).eval()(tokens, attention_mask=tokens != 0).last_hidden_state
        >>> hidden.shape
        torch.Size([2, 3, 64])
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError("transformers 4.53 or later is needed: pip install 'transformers>=4.53'") from error
    if "flash" in name:
        raise ValueError(
            f"name must not contain 'flash', which transformers reserves for its own kernels; got {name!r}"
        )
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, attention_mask)
    return name


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Layout | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, as transformers' AttentionInterface calls it.

    Transposed views are not copied, and key and value heads are not repeated: the kernels know grouped-query attention.
    As in transformers' eager attention, a mask overrides causality and window. Without a mask `is_causal` (else
    `module.is_causal`) and `sliding_window` decide.

    Args:
        module: The attention layer.
        query: ``[batch, nheads, seqlen_q, headdim]``.
        key: ``[batch, nheads_k, seqlen_k, headdim]``.
        value: ``[batch, nheads_k, seqlen_k, headdim_v]``.
        attention_mask: The result of `attention_mask`, a padding mask ``[batch, seqlen_k]``, a mask ``[1 or batch, 1 or
            nheads, 1 or seqlen_q, 1 or seqlen_k]``, or None. A bool mask is true where a key counts. A floating mask is
            added to the scores, with a gradient; a padding mask of floats holds 0, and -inf or the smallest number of
            its dtype. A padding mask may also hold the integers 0 and 1, 1 for the tokens that count.
        dropout: The probability of dropping an attention probability.
        scaling: The factor on the scores; default ``1 / sqrt(headdim)``.
        sliding_window: The number of keys that a query sees, its own included, to each side (causal: to the left).
        softcap: Scores become ``softcap * tanh(score / softcap)``; None for off.
        is_causal: A query sees no later key.
        cu_seq_lens_q: ``[sequences + 1]``, the first row of each sequence in a batch that a collator packed.
        cu_seq_lens_k: The same for keys.
        max_length_q: The longest sequence of cu_seq_lens_q.
        max_length_k: The longest sequence of cu_seq_lens_k.
        s_aux: ``[nheads]``, attention sinks: see learnable_sink of `flash_attn_func`.
        position_bias: Added to the scores, with a gradient; broadcasts to ``[batch, nheads, seqlen_q, seqlen_k]``.
        kwargs: Other arguments of transformers.

    Returns:
        ``[batch, seqlen_q, nheads, headdim_v]``, and None in place of the probabilities.

    Raises:
        NotImplementedError: For masks and features that the kernels lack.
        ValueError: For a padding mask of another batch size, or a mask of other integers.
    """
    if kwargs.get("output_attentions") or _records_attentions():
        raise _lacking("output_attentions=True; the probabilities are never stored")
    for argument in kwargs:
        if argument in _UNSUPPORTED and kwargs[argument] is not None:
            raise _lacking(_UNSUPPORTED[argument])

    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if isinstance(attention_mask, Layout):
        layout = _fitting(attention_mask, q, k)
    else:
        causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
        layout = _layout(attention_mask, q, k, causal, sliding_window)
    is_packed = cu_seq_lens_q is not None or cu_seq_lens_k is not None
    attn_bias = None
    if position_bias is not None or layout.attn_bias is not None:
        if is_packed:
            raise _lacking("cu_seq_lens_q together with a position bias, or with a mask that is added to the scores")
        layout = layout.unpacked(q.device)
        attn_bias = _attn_bias(position_bias, layout, q)
    if layout.is_decoding and (is_packed or dropout or (torch.is_grad_enabled() and _records_gradients(q, k, v))):
        layout = layout.packed(q.shape[0])
    if layout.kv_end < layout.kv_length:
        k, v = k[:, : layout.kv_end], v[:, : layout.kv_end]
    if layout.is_decoding:
        if k.requires_grad or v.requires_grad:  # a static cache that was filled with gradients on
            k, v = k.detach(), v.detach()
        result = flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=layout.cache_seqlens,
            cache_leftpad=layout.cache_leftpad,
            softmax_scale=scaling,
            causal=layout.right == 0,
            window_size=(layout.left, layout.right),
            softcap=softcap or 0.0,
            learnable_sink=s_aux,
        )
        return cast(Tensor, result), None

    options: dict[str, Any] = {
        "dropout_p": dropout,
        "softmax_scale": scaling,
        "causal": layout.right == 0,
        "window_size": (layout.left, layout.right),
        "softcap": softcap or 0.0,
        "learnable_sink": s_aux,
    }
    lengths = layout.lengths
    if is_packed:
        if cu_seq_lens_q is None or cu_seq_lens_k is None:
            raise _lacking("cu_seq_lens_q without cu_seq_lens_k, or the other way round")
        if layout.indices_q is not None or layout.indices_k is not None:
            raise _lacking("cu_seq_lens_q together with padding")
        if layout.key_ranges is not None:
            raise _lacking("cu_seq_lens_q together with a mask that is neither causal, nor full, nor a window")
        lengths = _given_lengths(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    batch, q_length = q.shape[:2]
    if lengths is None and layout.packed_rows is not None:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        of_call = checked_options(q, k, v, **options, alibi_slopes=None, deterministic=False, backend=None)
        out = attend_to_sequences(q, k, v, layout.packed_rows, of_call)
        return out.view(batch, q_length, *out.shape[1:]), None
    if lengths is None:
        if layout.key_ranges is not None:
            options["key_ranges"] = layout.key_ranges
        if attn_bias is not None:
            options["attn_bias"] = attn_bias
        return cast(Tensor, flash_attn_func(q, k, v, **options)), None

    k, v = _packed(k, layout.indices_k), _packed(v, layout.indices_k)
    out = cast(Tensor, flash_attn_varlen_func(_packed(q, layout.indices_q), k, v, *lengths, **options))
    if layout.indices_q is not None:
        out = index_put_first_axis(out, layout.indices_q, batch * q_length)
    return out.view(batch, q_length, *out.shape[1:]), None


def attention_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Layout | Tensor | None = None,
    cache_position: Tensor | None = None,
    **kwargs: Any,
) -> Layout:
    """The mask of all layers, as transformers' AttentionMaskInterface calls it.

    A padding mask is read on the host, once per forward, which synchronises with the GPU; not so for one query for each
    row behind a static cache.

    Args:
        batch_size: The number of rows.
        q_length: The number of queries.
        kv_length: The number of keys.
        q_offset: The position of the first query.
        kv_offset: The position of the first key.
        mask_function: transformers' function of (batch, head, query, key); default causal.
        attention_mask: The padding mask ``[batch, n]`` as in `attention`, or an earlier result of this function.
        cache_position: The positions of the queries; before transformers 5 in place of q_length and q_offset.
        kwargs: Other arguments of transformers.

    Returns:
        A `Layout`.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask  # torch 2.11 cannot trace `transformers`

    if isinstance(attention_mask, Layout):  # generate() makes the mask, then the model asks again
        return attention_mask
    if mask_function is None:
        mask_function = causal_mask_function
    if cache_position is not None:
        q_length, q_offset = cache_position.shape[0], int(cache_position[0])
        place: dict[str, Any] = {"cache_position": cache_position}
    else:
        place = {"q_length": q_length, "q_offset": q_offset}

    if attention_mask is not None:
        attention_mask = padding_of(attention_mask, batch_size)
    seen = seen_of(mask_function)
    mask = Mask(seen or Seen(), batch_size, q_length or 0, kv_length, q_offset, kv_offset, attention_mask)
    known = mask if seen is not None else _with_traced(mask, mask_function, kwargs)
    if known is not None:
        layout = _layout_of_known(known, kwargs.get("device", "cpu"))
        if layout is not None:
            return layout
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    drawn: Tensor = sdpa_mask(
        batch_size=batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **place,
        **kwargs,
    )
    return layout_of_drawn(drawn, batch_size, drawn.shape[-2], kv_length)


def _layout_of_known(mask: Mask, device: torch.device | str) -> Layout | None:
    """The layout whose function is the fastest; None for packed rows behind cached keys."""
    mask = without_idle_chunks(mask)
    layout = decoding_layout_of(mask) or layout_of(mask)
    if layout is not None:
        if isinstance(mask.q_offset, Tensor):  # a layer raises it in place when it writes to a static cache
            mask = mask._replace(q_offset=mask.q_offset.clone())
        return replace(layout, source=mask)
    return ranged_layout_of(mask, device) if has_ranges(mask) else None


def _with_traced(mask: Mask, mask_function: Callable[..., Any], kwargs: dict[str, Any]) -> Mask | None:
    """The mask with a guess at the keys that an unknown `mask_function` lets a query see; None where nothing traces."""
    window = kwargs.get("local_size")  # transformers also passes the length of the chunks of chunked attention
    is_chunked = window is not None and window != getattr(kwargs.get("config"), "sliding_window", None)
    if not torch.compiler.is_compiling() or CLOSURES_ARE_TRACED or is_chunked or kwargs.get("use_vmap", True):
        return None
    causal = "allow_is_bidirectional_skip" not in kwargs
    return traced_mask(mask_function, mask, causal=causal, window=window, device=kwargs.get("device", "cpu"))


def _records_attentions() -> bool:
    """True if the model records probabilities. GPT-2 and OPT do not pass output_attentions on to their layers."""
    if _active_collector is None:
        return False
    recorded = _active_collector.get()
    return recorded is not None and any(key.endswith("attentions") for key in recorded)


def _records_gradients(*tensors: Tensor) -> bool:
    return any(tensor.requires_grad for tensor in tensors)


def _needs_gradient(mask: Tensor) -> bool:
    return torch.is_grad_enabled() and mask.requires_grad


def _fitting(layout: Layout, q: Tensor, k: Tensor) -> Layout:
    """The layout on the device of q and k; NotImplementedError if they have other lengths."""
    q_length, kv_length = q.shape[1], k.shape[1]
    if layout.q_length != q_length or layout.kv_length != kv_length:
        raise _lacking(
            f"a mask for {layout.q_length} queries and {layout.kv_length} keys in a layer that has {q_length} and "
            f"{kv_length}"
        )
    device = layout.device
    return layout if device is None or device == q.device else layout.to(q.device)


def _layout(mask: Tensor | None, q: Tensor, k: Tensor, causal: bool, sliding_window: int | None) -> Layout:
    """The layout of a mask tensor, or of the layer's causal and sliding_window without one."""
    batch, q_length = q.shape[:2]
    kv_length = k.shape[1]
    if mask is not None and mask.ndim != 2:
        return _layout_of_tensor(mask, q, kv_length)
    window = -1 if sliding_window is None else sliding_window - 1  # keys in addition to the query's own
    seen = Seen(left=window, right=0 if causal else window)
    padding = None if mask is None else padding_of(mask, batch)
    padded = Mask(seen, batch, q_length, kv_length, kv_length - q_length, 0, padding)
    layout = _layout_of_known(padded, q.device)
    assert layout is not None  # it has no packed rows
    return layout


def _attn_bias(position_bias: Tensor | None, layout: Layout, q: Tensor) -> Tensor:
    """The option attn_bias: the position bias, the mask of a layout, or their sum."""
    bias = layout.attn_bias
    if position_bias is not None:
        sizes = (q.shape[0], q.shape[2], layout.q_length, layout.kv_length)
        shape = tuple(position_bias.shape)
        position_bias = position_bias[(None,) * (4 - len(shape))]
        if position_bias.ndim != 4 or any(
            n not in (1, whole) for n, whole in zip(position_bias.shape, sizes, strict=True)
        ):
            raise _lacking(f"a position bias of shape {shape}; allowed: {sizes}, or 1 in place of a size")
        position_bias = position_bias.expand(-1, -1, -1, layout.kv_length)[..., : layout.kv_end]
        if bias is None:
            bias = position_bias
        elif bias.dtype == torch.bool:
            bias = position_bias.masked_fill(~bias, -torch.inf)
        else:
            bias = position_bias + bias
    assert bias is not None
    if bias.dtype in (torch.bool, q.dtype) or (bias.dtype == torch.float32 and q.dtype != torch.float64):
        return bias
    return bias.to(torch.promote_types(q.dtype, torch.float32))


def _packed(states: Tensor, indices: Tensor | None) -> Tensor:
    """The tokens `indices` of ``[batch, seqlen, heads, headdim]``, end to end; None for all tokens."""
    flat = states.flatten(0, 1)
    return flat if indices is None else index_first_axis(flat, indices)


def _given_lengths(
    cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor, max_length_q: int | None, max_length_k: int | None
) -> tuple[Tensor, Tensor, int, int]:
    """The lengths from a collator that packs sequences, as arguments of `flash_attn_varlen_func`."""
    if max_length_q is None:
        max_length_q = int(cu_seq_lens_q.diff().max())
    if max_length_k is None:
        max_length_k = int(cu_seq_lens_k.diff().max())
    return cu_seq_lens_q.to(torch.int32), cu_seq_lens_k.to(torch.int32), int(max_length_q), int(max_length_k)


def _layout_of_tensor(mask: Tensor, q: Tensor, kv_length: int) -> Layout:
    """The layout of a mask tensor that is no padding mask."""
    batch, q_length, nheads, _ = q.shape
    shape = f"this attention mask, of shape {tuple(mask.shape)}"
    sizes = (batch, nheads, q_length, kv_length)
    if mask.ndim != 4 or not all(size in (1, whole) for size, whole in zip(mask.shape, sizes, strict=True)):
        raise _lacking(f"{shape}; allowed: {sizes}, or 1 in place of a size")
    added = Layout(q_length, kv_length, kv_length, -1, -1, attn_bias=mask.expand(-1, -1, -1, kv_length))
    if _needs_gradient(mask) or not (torch.compiler.is_compiling() or only_hides(mask)):
        return added
    kept = kept_by(mask)
    if mask.is_floating_point() and torch.compiler.is_compiling():
        has_average = (~kept.any(dim=-1) & mask.isfinite().any(dim=-1)).any()
        kept = checked(kept, ~has_average, AVERAGE)
    return layout_of_drawn(kept, batch, q_length, kv_length)


def _lacking(feature: str) -> NotImplementedError:
    return NotImplementedError(unsupported(feature))
