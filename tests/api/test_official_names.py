"""The public names of flash-attn 2.8, and their parameters, in the modules that this package mirrors.

The lists were read from the release of `flash_attn_mini.compat.VERSION`.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

import flash_attn_mini
from flash_attn_mini import compat

TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,"
    " deterministic=False, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
PRIVATE_TAIL = "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes"
PRIVATE_GRADIENTS = "dout, q, k, v, out, softmax_lse, dq, dk, dv"

# The parameters of each function and method, as they stand in a definition.
OFFICIAL: dict[str, dict[str, str]] = {
    "flash_attn_interface": {
        "flash_attn_func": f"q, k, v, {TAIL}",
        "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
        "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
        "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {TAIL}, block_table=None",
        "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {TAIL}",
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL}",
        "flash_attn_with_kvcache": (
            "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,"
            " cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,"
            " window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,"
            " return_softmax_lse=False"
        ),
        # Private by their names, and used by other packages.
        "_flash_attn_forward": f"q, k, v, {PRIVATE_TAIL}, return_softmax",
        "_flash_attn_backward": f"{PRIVATE_GRADIENTS}, {PRIVATE_TAIL}, deterministic, rng_state=None",
        "_flash_attn_varlen_forward": (
            f"q, k, v, {LENGTHS}, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1,"
            " softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None,"
            " zero_tensors=False"
        ),
        "_flash_attn_varlen_backward": (
            f"{PRIVATE_GRADIENTS}, {LENGTHS}, {PRIVATE_TAIL}, deterministic, rng_state=None, zero_tensors=False"
        ),
        "_get_block_size_n": "device, head_dim, is_dropout, is_causal",
    },
    "bert_padding": {
        "index_first_axis": "input, indices",
        "index_first_axis_residual": "input, indices",
        "index_put_first_axis": "values, indices, first_axis_dim",
        "pad_input": "hidden_states, indices, batch, seqlen",
        "unpad_input": "hidden_states, attention_mask, unused_mask=None",
        "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
    },
    "layers.rotary": {
        "apply_rotary_emb": (
            "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None"
        ),
        "apply_rotary_emb_func": (
            "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None"
        ),
        "apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
        "apply_rotary_emb_qkv_": (
            "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None"
        ),
        "apply_rotary_emb_torch": "x, cos, sin, interleaved=False",
        "RotaryEmbedding": "dim, base=10000.0, interleaved=False, scale_base=None, device=None",
        "RotaryEmbedding.forward": "self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None",
    },
}
CONSTANTS = {"flash_attn_interface": {"USE_TRITON_ROCM"}, "bert_padding": set(), "layers.rotary": set()}
EXTENSION = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]

AUTOGRAD = "a class behind a public function; ours has other arguments"
HELPER = "a helper of its module that is no part of attention"
ABSENT: dict[str, dict[str, str]] = {
    "flash_attn_interface": {
        **dict.fromkeys(
            (
                "FlashAttnFunc",
                "FlashAttnKVPackedFunc",
                "FlashAttnQKVPackedFunc",
                "FlashAttnVarlenFunc",
                "FlashAttnVarlenKVPackedFunc",
                "FlashAttnVarlenQKVPackedFunc",
            ),
            AUTOGRAD,
        ),
        "flash_attn_gpu": "the extension: flash_attn_2_cuda after compat.install()",
        "maybe_contiguous": HELPER,
        "noop_custom_op_wrapper": "defined for PyTorch before 2.4 only",
        "noop_register_fake_wrapper": "defined for PyTorch before 2.4 only",
        "round_multiple": HELPER,
    },
    "bert_padding": dict.fromkeys(("IndexFirstAxis", "IndexFirstAxisResidual", "IndexPutFirstAxis"), AUTOGRAD),
    "layers.rotary": {
        **dict.fromkeys(("ApplyRotaryEmb", "ApplyRotaryEmbKV_", "ApplyRotaryEmbQKV_"), AUTOGRAD),
        "rotate_half": HELPER,
    },
}


def mirrored(module: str) -> Any:
    return importlib.import_module(f"flash_attn_mini.{module}")


def found(module: str, name: str) -> Any:
    value = mirrored(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in OFFICIAL.items() for name in names])
def test_parameters_are_the_official_ones(module: str, name: str) -> None:
    """Names, order and defaults. What is added is keyword-only."""
    official: Any = eval(f"lambda {OFFICIAL[module][name]}: None")
    expected = [(p.name, p.default) for p in inspect.signature(official).parameters.values()]
    parameters = inspect.signature(found(module, name)).parameters.values()
    ours = [(p.name, p.default) for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert ours == expected
    added = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert all(p.default is not inspect.Parameter.empty for p in added)


@pytest.mark.parametrize("module", OFFICIAL)
def test_every_public_name_is_official(module: str) -> None:
    """A name that is not must be private, or have a module that the official package lacks."""
    names = vars(mirrored(module))
    public = {
        name
        for name, value in names.items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("flash_attn_mini")
    }
    public &= set(names.get("__all__", [n for n in public if names[n].__module__ == f"flash_attn_mini.{module}"]))
    official = set(OFFICIAL[module]) | CONSTANTS[module]
    assert public <= official
    assert all(hasattr(mirrored(module), name) for name in CONSTANTS[module])


@pytest.mark.parametrize("module", ABSENT)
def test_absent_names_are_absent(module: str) -> None:
    """A name that appears belongs in the list of official ones, with its parameters."""
    assert not [name for name in ABSENT[module] if hasattr(mirrored(module), name)]


def test_names_of_the_package_and_of_the_extension() -> None:
    public = [name for name in OFFICIAL["flash_attn_interface"] if not name.startswith("_")]
    package = compat._modules()["flash_attn"]
    assert sorted(package.__all__) == public == sorted(n for n in flash_attn_mini.__all__ if n.startswith("flash_attn"))
    for name in public:
        assert getattr(package, name) is found("flash_attn_interface", name)
    extension = compat._modules().get("flash_attn_2_cuda")
    if extension is None:
        pytest.skip("the extension is not built")
    assert [name for name in EXTENSION if not callable(getattr(extension, name, None))] == []


def test_parameters_that_transformers_looks_for() -> None:
    """transformers passes an option on if the signature of flash_attn_varlen_func has it, and drops it otherwise."""
    flash = pytest.importorskip("transformers.modeling_flash_attention_utils")
    if not hasattr(flash, "_lazy_define_process_function"):
        pytest.skip("this version of transformers has no such function")
    process = flash._lazy_define_process_function(flash_attn_mini.flash_attn_varlen_func)
    supported: dict[str, bool] = process.keywords["supports_mapping"]
    assert {"deterministic", "softcap", "window_size"} <= supported.keys()
    names = {"block_table", "deterministic", "softcap", "window_size"} & supported.keys()  # older versions have fewer
    assert [name for name in names if not supported[name]] == []
