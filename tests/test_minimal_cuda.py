"""csrc/minimal/flash_attn_minimal.cu, the teaching kernel, against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from flash_attn_mini.ladder.verify import verify
from flash_attn_mini.reference import attention_reference

pytestmark = pytest.mark.gpu


def draw(seqlen_q: int, seqlen_k: int, headdim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seqlen_q + seqlen_k + headdim)
    return tuple(torch.randn(s, headdim, device="cuda", generator=generator) for s in (seqlen_q, seqlen_k, seqlen_k))


def run_both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(the kernel's output, the reference's), both [seqlen_q, headdim]."""
    from flash_attn_mini import _C

    scale = q.shape[1] ** -0.5
    out = _C.minimal_fwd(q, k, v, scale, causal)
    ref, _ = attention_reference(*(x[None, :, None] for x in (q, k, v)), softmax_scale=scale, causal=causal)
    return out, ref[0, :, 0]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seqlen_k", [128, 256, 500, 1000, 4096])
def test_right_for_key_lengths(seqlen_k: int, causal: bool) -> None:
    out, ref = run_both(*draw(seqlen_k, seqlen_k, 128), causal)
    report = verify(out, ref)
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "headdim", "causal"),
    [
        pytest.param(1, 1, 1, True, id="one number"),
        pytest.param(1, 333, 64, True, id="one query sees every key"),
        pytest.param(65, 129, 40, False, id="one more than each tile"),
        pytest.param(70, 200, 96, True, id="diagonal to the right of the tile's corner"),
        pytest.param(63, 64, 7, True, id="odd head dim"),
    ],
)
def test_right_for_ragged_shapes(seqlen_q: int, seqlen_k: int, headdim: int, causal: bool) -> None:
    out, ref = run_both(*draw(seqlen_q, seqlen_k, headdim), causal)
    report = verify(out, ref)
    assert report.passed, str(report)


def test_rows_that_see_no_key_are_zero() -> None:
    out, ref = run_both(*draw(200, 70, 64), causal=True)
    assert torch.equal(out[:130], torch.zeros_like(out[:130]))
    assert verify(out[130:], ref[130:]).passed


def test_no_keys_at_all_give_zeros() -> None:
    out, _ = run_both(*draw(5, 0, 64), causal=False)
    assert torch.equal(out, torch.zeros_like(out))


def test_nan_in_a_query_stays_in_its_row() -> None:
    q, k, v = draw(64, 64, 64)
    q[3] = float("nan")
    out, _ = run_both(q, k, v, causal=False)
    assert out[3].isnan().all()
    assert not out[torch.arange(64, device="cuda") != 3].isnan().any()


def test_head_dim_above_128_is_an_error() -> None:
    from flash_attn_mini import _C

    q, k, v = draw(16, 16, 136)
    with pytest.raises(ValueError, match="headdim"):
        _C.minimal_fwd(q, k, v, 1.0, False)
