"""Context parallel: attention over sequences whose tokens are spread over the ranks of a torch.distributed group."""

from .functions import cp_flash_attn_func, cp_flash_attn_varlen_func
from .shards import Shards, packed_shards, zigzag_shards

__all__ = ["Shards", "cp_flash_attn_func", "cp_flash_attn_varlen_func", "packed_shards", "zigzag_shards"]
