"""flash_attn_mini as an attention implementation of transformers (AttentionInterface; 4.53 or later, BERT 5 or later).

    model = AutoModel.from_pretrained(path, attn_implementation=register())

Two functions are registered under one name: `attention_mask` says before the first layer which scores a query may use,
`attention` computes every layer. What the kernels cannot express raises NotImplementedError; no mask is ever ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from flash_attn_mini.flash_attn_interface import flash_attn_func

ATTENTION_NAME = "attn_mini"

# Arguments by which transformers asks for what this version lacks, and what to call it. Any other is layout or
# bookkeeping (position_ids, use_cache, ...) and has no influence on the result.
_UNSUPPORTED = {
    "softcap": "softcap",
    "s_aux": "attention sinks (s_aux)",
    "position_bias": "an additive position bias",
    "head_mask": "a head mask",
    "cache": "a paged cache (continuous batching)",
    "cu_seq_lens_q": "packed sequences (cu_seq_lens_q)",
    "cu_seq_lens_k": "packed sequences (cu_seq_lens_k)",
}


def register(name: str = ATTENTION_NAME) -> str:
    """Makes `attn_implementation=name` choose flash_attn_mini in every transformers model that takes one.

    Args:
        name: under which to register. transformers takes every name with "flash" in it for one of its own kernels,
            so such a name is refused.

    Returns:
        `name`, so that `from_pretrained(path, attn_implementation=register())` is all there is to write.

    Raises:
        ImportError: transformers is missing, or older than 4.53.
        ValueError: `name` contains "flash".

    Models run where and in the dtype in which they are loaded; the backend is chosen as for any call
    (`flash_attn_mini.use_backend`, `FLASH_ATTN_MINI_BACKEND`, else by device). Batches must hold sequences of equal
    length: a mask with padding raises NotImplementedError, as do dropout, sliding windows that cut keys off, softcap,
    sinks, position biases and `output_attentions`. They also train, with attention dropout set to 0.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from flash_attn_mini.integrations.transformers import register
        >>> config = BertConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=1, intermediate_size=64,
        ...                     attn_implementation=register())
        >>> hidden = BertModel(config).eval()(torch.tensor([[101, 7592, 102]])).last_hidden_state
        >>> hidden.shape
        torch.Size([1, 3, 64])
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
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer's attention: `[batch, heads, seqlen, headdim]` in, `([batch, seqlen_q, heads, headdim], None)` out.

    Transposed views go to the kernels as they are. Key and value heads are not repeated: grouped-query attention is the
    kernels' own. A mask given here decides over causality; without one `is_causal` does, else `module.is_causal`.
    """
    if dropout:
        raise _lacking(f"attention dropout (dropout={dropout}); call model.eval() or set its attention dropout to 0")
    if sliding_window is not None and key.shape[2] > sliding_window:
        raise _lacking(f"a sliding window (of {sliding_window} for {key.shape[2]} keys)")
    if kwargs.get("output_attentions"):
        raise _lacking("output_attentions=True; the probabilities are never stored")
    for argument, feature in _UNSUPPORTED.items():
        if kwargs.get(argument) is not None:
            raise _lacking(feature)

    causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    if attention_mask is not None:
        causal = _causal_of(attention_mask, query.shape[2], key.shape[2])
    q, k, v = (states.transpose(1, 2) for states in (query, key, value))
    out = flash_attn_func(q, k, v, softmax_scale=scaling, causal=causal)
    return cast(Tensor, out), None


def attention_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """None where causal or full attention over all keys says it all, else the mask `[batch, 1, seqlen_q, seqlen_k]`.

    The common cases cost nothing. Any other pattern (padding, packed sequences, windows, a static cache) is drawn out,
    and `attention` looks whether it comes to one of the two after all.
    """
    from transformers import masking_utils

    if mask_function is None:
        mask_function = masking_utils.causal_mask_function
    if cache_position is not None:  # transformers before 5: the queries' positions instead of their number and offset
        q_length, q_offset = cache_position.shape[0], cache_position[0]
        place: dict[str, Any] = {"cache_position": cache_position}
    else:
        place = {"q_length": q_length, "q_offset": q_offset}

    unpadded = attention_mask is None or (attention_mask.shape[-1] == kv_length and bool(attention_mask.all()))
    if unpadded and mask_function is getattr(masking_utils, "bidirectional_mask_function", None):
        return None
    ends_meet = int(q_offset) + (q_length or 0) == kv_offset + kv_length  # what bottom-right alignment means
    if unpadded and ends_meet and mask_function is masking_utils.causal_mask_function:
        return None
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    drawn: Tensor = masking_utils.sdpa_mask(
        batch_size=batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **place,
        **kwargs,
    )
    return drawn


def _causal_of(mask: Tensor, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether a mask is the causal one (True) or lets every query see every key (False); any other raises."""
    allowed = mask if mask.dtype == torch.bool else mask == (1 if mask.ndim == 2 else 0)  # 4-d floats are added
    if bool(allowed.all()):
        return False
    if mask.ndim == 4 and mask.shape[-2:] == (seqlen_q, seqlen_k):
        causal = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=mask.device).tril(seqlen_k - seqlen_q)
        if bool((allowed == causal).all()):
            return True
    raise _lacking(
        f"this attention mask, of shape {tuple(mask.shape)}: it hides keys (padding, packed sequences, a window or a "
        "static cache). Batch sequences of equal length together, without padding"
    )


def _lacking(feature: str) -> NotImplementedError:
    return NotImplementedError(
        f"flash_attn_mini in transformers does not support {feature}. attn_implementation='sdpa' does."
    )
