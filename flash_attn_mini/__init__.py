"""flash_attn_mini: exact attention with FlashAttention-2's API and call chain, on CUDA, Triton and the CPU."""

from . import masks as masks  # builders of the option key_ranges
from . import sdpa as sdpa  # lists this package in PyTorch's registry of implementations; activates nothing
from . import vmap as vmap  # registers the kernels that torch.vmap needs
from .backends import available_backends, use_backend
from .context_parallel import cp_flash_attn_func, cp_flash_attn_varlen_func, packed_shards, zigzag_shards
from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "available_backends",
    "cp_flash_attn_func",
    "cp_flash_attn_varlen_func",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "packed_shards",
    "use_backend",
    "zigzag_shards",
]
