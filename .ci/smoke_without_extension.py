"""Checks a package without the extension on a machine without a GPU: Triton's interpreter, and the reference."""

import warnings

import torch
import torch.nn.functional as F

import flash_attn_mini
from flash_attn_mini.backends import extension

assert not extension.IS_BUILT
q, k, v = torch.randn(3, 2, 77, 4, 64).requires_grad_()
heads_first = (x.transpose(1, 2) for x in (q, k, v))
expected = F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
(expected_dq,) = torch.autograd.grad(expected.square().sum(), q)
for backend in ("triton", None):
    with warnings.catch_warnings(record=True) as caught:
        out = flash_attn_mini.flash_attn_func(q, k, v, causal=True, backend=backend)
    torch.testing.assert_close(out, expected)
    (dq,) = torch.autograd.grad(out.square().sum(), q)
    torch.testing.assert_close(dq, expected_dq, rtol=1e-3, atol=1e-4)
    assert len(caught) == (backend is None), [str(one.message) for one in caught]
print(f"flash_attn_mini {flash_attn_mini.__version__} without its extension: triton and the reference agree with SDPA")
