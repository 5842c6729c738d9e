"""Arguments as NumPy values and tensors give the bits of the same call with plain Python values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flash_attn_mini import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn_mini.argument_checks import checked_options
from flash_attn_mini.flash_attn_interface import _flash_attn_forward

LENGTHS = (13, 20)
Call = Callable[..., Any]


def calls(device: str, draw: torch.Generator) -> dict[str, Call]:
    """Every public function on its own inputs; the caller gives the options."""
    rows = sum(LENGTHS)
    qkv = torch.randn(rows, 3, 4, 16, generator=draw).half().to(device)
    q, k, v = qkv.unbind(1)
    cu = torch.tensor([0, LENGTHS[0], rows], dtype=torch.int32, device=device)

    def varlen(max_seqlen: Any = 20, **options: Any) -> Any:
        return flash_attn_varlen_func(q, k, v, cu, cu, max_seqlen, max_seqlen, **options)

    def varlen_kvpacked(max_seqlen: Any = 20, **options: Any) -> Any:
        return flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], cu, cu, max_seqlen, max_seqlen, **options)

    def varlen_qkvpacked(max_seqlen: Any = 20, **options: Any) -> Any:
        return flash_attn_varlen_qkvpacked_func(qkv, cu, max_seqlen, **options)

    return {
        "dense": lambda **options: flash_attn_func(q[None], k[None], v[None], **options),
        "qkvpacked": lambda **options: flash_attn_qkvpacked_func(qkv[None], **options),
        "kvpacked": lambda **options: flash_attn_kvpacked_func(q[None], qkv[None, :, 1:], **options),
        "varlen": varlen,
        "varlen_kvpacked": varlen_kvpacked,
        "varlen_qkvpacked": varlen_qkvpacked,
    }


FUNCTIONS = ("dense", "qkvpacked", "kvpacked", "varlen", "varlen_kvpacked", "varlen_qkvpacked")
each_function = pytest.mark.parametrize("function", FUNCTIONS)
WINDOWS: dict[str, Callable[[int, int], Any]] = {
    "list": lambda left, right: [left, right],
    "tensor": lambda left, right: torch.tensor([left, right]),
    "int32_tensor": lambda left, right: torch.tensor([left, right], dtype=torch.int32),
    "0d_tensors": lambda left, right: (torch.tensor(left), torch.tensor(right)),
    "numpy": lambda left, right: np.array([left, right]),
    "numpy_integers": lambda left, right: (np.int64(left), np.int32(right)),
    "size": lambda left, right: torch.Size((left, right)),
}
INTEGERS = {"numpy": np.int64, "numpy_0d": np.array, "tensor": torch.tensor, "tensor_1": lambda x: torch.tensor([x])}
FLOATS: dict[str, Callable[[float], Any]] = {
    "numpy": np.float64,
    "numpy_float32": np.float32,
    "numpy_0d": np.array,
    "tensor": torch.tensor,
    "tensor_float64": lambda x: torch.tensor(x, dtype=torch.float64),
}
TRUE: dict[str, Any] = {
    "one": 1,
    "numpy": np.bool_(True),
    "numpy_0d": np.array(True),
    "tensor": torch.tensor(True),
    "integer_tensor": torch.tensor([3]),
    "float": 0.5,
}
FALSE: dict[str, Any] = {"zero": 0, "numpy": np.bool_(False), "tensor": torch.tensor(False), "none": None}


def assert_same(got: Any, expected: Any) -> None:
    got, expected = (x if isinstance(x, tuple) else (x,) for x in (got, expected))
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def both(call: Call, backend: str, plain: dict[str, Any], given: dict[str, Any]) -> None:
    results = []
    for options in (plain, given):
        torch.manual_seed(5)
        results.append(call(**options, backend=backend))
    assert_same(*results)


@each_function
@pytest.mark.parametrize("form", WINDOWS)
def test_any_pair_is_a_window(form: str, function: str, backend: str, device: str, draw: torch.Generator) -> None:
    left, right = (int(x) for x in torch.randint(0, 12, (2,), generator=draw))
    call = calls(device, draw)[function]
    both(call, backend, {"window_size": (left, right)}, {"window_size": WINDOWS[form](left, right)})


@pytest.mark.parametrize("minus_one", [torch.tensor(-1), np.int64(-1)], ids=["tensor", "numpy"])
def test_an_unbounded_window_becomes_two_python_integers(minus_one: Any) -> None:
    q = torch.zeros(1, 2, 1, 8)
    options = checked_options(q, q, q, 0.0, None, False, (minus_one, minus_one), 0.0, None, False, None)
    assert [type(side) for side in (options.window_size_left, options.window_size_right)] == [int, int]


@pytest.mark.gpu
@pytest.mark.parametrize("window_size", [torch.tensor([3, 1]), (torch.tensor(3), torch.tensor(1))], ids=["pair", "0d"])
def test_a_window_may_lie_on_the_gpu(window_size: Any, backend: str, device: str, draw: torch.Generator) -> None:
    on_device = window_size.to(device) if isinstance(window_size, Tensor) else [x.to(device) for x in window_size]
    both(calls(device, draw)["dense"], backend, {"window_size": (3, 1)}, {"window_size": on_device})


@each_function
@pytest.mark.parametrize("name", ["dropout_p", "softmax_scale", "softcap"])
def test_any_number_is_a_number(name: str, function: str, backend: str, device: str, draw: torch.Generator) -> None:
    call = calls(device, draw)[function]
    for form in FLOATS.values():
        both(call, backend, {name: 0.25}, {name: form(0.25)})  # exact in float32
    for form in INTEGERS.values():
        value = 0 if name == "dropout_p" else 2
        both(call, backend, {name: float(value)}, {name: form(value)})


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if "varlen" in name])
@pytest.mark.parametrize("form", INTEGERS)
def test_max_seqlen_is_any_integer(form: str, function: str, backend: str, device: str, draw: torch.Generator) -> None:
    both(calls(device, draw)[function], backend, {"max_seqlen": 20}, {"max_seqlen": INTEGERS[form](20)})


@each_function
@pytest.mark.parametrize("name", ["causal", "deterministic", "return_attn_probs"])
def test_any_truth_value_is_a_flag(name: str, function: str, backend: str, device: str, draw: torch.Generator) -> None:
    call = calls(device, draw)[function]
    for plain, forms in ((True, TRUE), (False, FALSE)):
        for value in forms.values():
            both(call, backend, {name: plain}, {name: value})


def test_the_official_forward_accepts_the_same(draw: torch.Generator) -> None:
    q, k, v = torch.randn(3, 1, 9, 2, 16, generator=draw)
    plain = _flash_attn_forward(q, k, v, 0.0, 0.25, True, 4, 0, 2.0, None, False)
    given = (np.float32(0.0), torch.tensor(0.25), 1, torch.tensor(4), np.int64(0), np.array(2.0), None, np.bool_(False))
    assert_same(_flash_attn_forward(q, k, v, *given), plain)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "window_three": ({"window_size": torch.tensor([1, 2, 3])}, "window_size is tensor.*pair of integers"),
    "window_matrix": ({"window_size": torch.zeros(2, 2, dtype=torch.int64)}, r"window_size\[0\].*integer"),
    "window_floats": ({"window_size": torch.tensor([1.0, 2.0])}, r"window_size\[0\].*integer"),
    "window_dict": ({"window_size": {0: 1, 1: 2}}, "window_size is {0: 1, 1: 2}.*pair of integers"),
    "window_bytes": ({"window_size": b"ab"}, "window_size is b'ab'.*pair of integers"),
    "window_set": ({"window_size": {1, 2}}, "window_size is {1, 2}.*pair of integers"),
    "window_text": ({"window_size": "12"}, "window_size is '12'.*pair of integers"),
    "window_unbounded_floats": ({"window_size": (-1.0, -1.0)}, r"window_size\[0\] is -1.0.*integer"),
    "window_0d": ({"window_size": torch.tensor(3)}, r"window_size is tensor\(3\).*pair of integers"),
    "dropout_tensor": ({"dropout_p": torch.tensor([0.1, 0.2])}, "dropout_p is tensor.*number"),
    "dropout_bool": ({"dropout_p": torch.tensor(True)}, r"dropout_p is tensor\(True\).*number"),
    "scale_array": ({"softmax_scale": np.array([0.1, 0.2])}, "softmax_scale is array.*number"),
    "scale_complex": ({"softmax_scale": np.complex64(1j)}, "softmax_scale is .*number"),
    "causal_text": ({"causal": "False"}, "causal is 'False'.*True or False"),
    "causal_list": ({"causal": [0]}, r"causal is \[0\].*True or False"),
    "causal_tensor": ({"causal": torch.tensor([True, False])}, "causal is tensor.*True or False"),
    "causal_array": ({"causal": np.array([True, False])}, "causal is array.*True or False"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_other_values_are_named(wrong: str, draw: torch.Generator) -> None:
    options, says = WRONG[wrong]
    with pytest.raises(TypeError, match=says):
        calls("cpu", draw)["dense"](**options)


def strided_nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([x[0, :5], x[1]])


def jagged(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([x[0, :5], x[1]], layout=torch.jagged)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("nested", [strided_nested, jagged])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_nested_tensors_are_named(nested: Call, which: str, draw: torch.Generator) -> None:
    call = dict(zip("qkv", torch.randn(3, 2, 9, 2, 16, generator=draw), strict=True))
    call[which] = nested(call[which])
    with pytest.raises(TypeError, match=rf"\b{which} is a nested tensor; allowed: .*flash_attn_varlen_func"):
        flash_attn_func(**call)


def test_sparse_slopes_are_named(draw: torch.Generator) -> None:
    with pytest.raises(TypeError, match=r"alibi_slopes has layout torch.sparse_coo; allowed: torch.strided"):
        calls("cpu", draw)["dense"](alibi_slopes=torch.rand(4, generator=draw).to_sparse())


@pytest.mark.parametrize("name", ["cpu (when traced)", "traced:cpu", "CPU", ""])
def test_only_names_of_backends_are_accepted(name: str, draw: torch.Generator) -> None:
    torch._dynamo.reset()
    q = torch.randn(1, 5, 2, 16, generator=draw)
    with pytest.raises(ValueError, match=r"backend .* is unknown; known: cuda, triton, cpu"):
        flash_attn_func(q, q, q, backend=name)
    compiled = torch.compile(lambda x: flash_attn_func(x, x, x, backend=name), backend="aot_eager")
    with pytest.raises(ValueError, match=r"backend .* is unknown; known: cuda, triton, cpu"):
        compiled(q)
