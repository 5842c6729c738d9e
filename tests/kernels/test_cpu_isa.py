"""The cpu backend's kernels for instruction sets below the machine's, selected by ATEN_CPU_CAPABILITY."""

from __future__ import annotations

from ..support.instruction_sets import each_lesser_level, each_lesser_level_always, run_on

SCRIPT = """
from flash_attn_mini import flash_attn_func
from tests.support.bounds import assert_forward_accurate, assert_gradients_accurate
from tests.support.cases import SMALL_FORWARD_CASES, make_dout, make_inputs
from tests.support.flash_bounds import assert_gradients_accurate_beside_flash

for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
    for case in SMALL_FORWARD_CASES:
        described = f"{case} {case.shape} {dtype} {level} {seed}"
        inputs = [x.requires_grad_() for x in make_inputs(case, dtype, "cpu", seed)]
        dout = make_dout(case, dtype, "cpu", seed)
        options = {"causal": case.causal, "softmax_scale": case.softmax_scale}
        out, lse, _ = flash_attn_func(*inputs, return_attn_probs=True, backend="cpu", **options)
        gradients = torch.autograd.grad(out, inputs, dout)
        with torch.no_grad():
            assert_forward_accurate(*inputs, out, lse, case=described, **options)
            judge = assert_gradients_accurate_beside_flash if case.headdim == 1 else assert_gradients_accurate
            judge(*inputs, dout, gradients, case=described, **options)
print("checked", len(SMALL_FORWARD_CASES))
"""

ROWS_WITHOUT_KEYS = """
from tests.support.rows_without_keys import CASES, check_rows_without_keys

for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
    for case in CASES:
        check_rows_without_keys(case, "cpu", "cpu", dtype, seed, f"{level} {seed}")
print("checked", len(CASES))
"""


@each_lesser_level_always
def test_small_cases_on_a_lesser_instruction_set(level: str) -> None:
    run_on(level, SCRIPT)


@each_lesser_level
def test_rows_without_keys_on_a_lesser_instruction_set(level: str) -> None:
    run_on(level, ROWS_WITHOUT_KEYS)
