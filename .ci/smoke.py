"""Checks a CUDA build on a machine without a GPU: the extension loads, describes its build, and runs on the CPU."""

import torch
import torch.nn.functional as F

import flash_attn_mini
from flash_attn_mini import _C

info = _C.build_info()
assert info["archs"] == [80, 90], info
assert info["hdims"] == [64], info
assert info["dtypes"] == ["bf16"], info
assert info["torch"] == torch.__version__, info

q, k, v = torch.randn(3, 2, 77, 4, 64)
out = flash_attn_mini.flash_attn_func(q, k, v, causal=True)
expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
torch.testing.assert_close(out, expected)
print(f"flash_attn_mini {flash_attn_mini.__version__} with torch {torch.__version__}: {info}")
