"""Attention in float64, written to be read: the meaning of every function of this package in a few lines of PyTorch.

The tests compare each backend with these functions. They form the whole score matrix, so their memory is quadratic in
the sequence length. They import only torch, run on CPU and CUDA, and are differentiable.
"""

from .attention import (
    attention_max_logits,
    attention_probabilities,
    attention_reference,
    attention_scores,
    softmax_with_lse,
)
from .backward import attention_reference_backward, attn_bias_reference_backward
from .kvcache import attention_kvcache_reference
from .masks import alibi_bias, in_key_ranges, visible_keys
from .packed import (
    attention_kvpacked_reference,
    attention_qkvpacked_reference,
    attention_varlen_kvpacked_reference,
    attention_varlen_qkvpacked_reference,
)
from .paging import page_slots, read_pages
from .philox import dropout_mask, dropout_masks_varlen
from .rotary import apply_rotary_reference
from .varlen import attention_varlen_reference

__all__ = [
    "alibi_bias",
    "apply_rotary_reference",
    "attention_kvcache_reference",
    "attention_kvpacked_reference",
    "attention_max_logits",
    "attention_probabilities",
    "attention_qkvpacked_reference",
    "attention_reference",
    "attention_reference_backward",
    "attention_scores",
    "attention_varlen_kvpacked_reference",
    "attention_varlen_qkvpacked_reference",
    "attention_varlen_reference",
    "attn_bias_reference_backward",
    "dropout_mask",
    "dropout_masks_varlen",
    "in_key_ranges",
    "page_slots",
    "read_pages",
    "softmax_with_lse",
    "visible_keys",
]
