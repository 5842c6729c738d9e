"""compat.install(): the names of the official package before and after. Each case runs in a new process."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from ..support.new_process import ROOT, run_python


def run(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a new process that can import this package and the contents of `folders`."""
    path = os.pathsep.join(str(folder) for folder in (*folders, ROOT))
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    result = run_python("-c", textwrap.dedent(code), environment=environment)
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """A folder with a package of the official name."""
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '2.0.0'\nflash_attn_func = 'the official one'\n")
    (package / "losses.py").write_text("")
    metadata = tmp_path / "flash_attn-2.0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.0.0\n")
    (metadata / "top_level.txt").write_text("flash_attn\n")
    return tmp_path


def test_users_imports_give_this_package() -> None:
    run(
        """
        import flash_attn_mini, flash_attn_mini.bert_padding, flash_attn_mini.compat, flash_attn_mini.layers.rotary
        flash_attn_mini.compat.install()

        import flash_attn
        import flash_attn.bert_padding
        import flash_attn.flash_attn_interface as interface
        import flash_attn_2_cuda
        from flash_attn import *
        from flash_attn import flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
        from flash_attn.flash_attn_interface import (
            _flash_attn_backward, _flash_attn_forward, _flash_attn_varlen_backward, _flash_attn_varlen_forward,
            _get_block_size_n, USE_TRITON_ROCM,
        )
        from flash_attn.layers.rotary import apply_rotary_emb

        assert interface is flash_attn_mini.flash_attn_interface is flash_attn.flash_attn_interface
        assert flash_attn_func is flash_attn.flash_attn_func is flash_attn_mini.flash_attn_func
        assert apply_rotary_emb is flash_attn_mini.layers.rotary.apply_rotary_emb
        assert flash_attn.layers.rotary.apply_rotary_emb is apply_rotary_emb
        assert unpad_input is flash_attn_mini.bert_padding.unpad_input is flash_attn.bert_padding.unpad_input
        assert USE_TRITON_ROCM is False
        assert callable(flash_attn_2_cuda.varlen_fwd)
        """
    )


def test_users_code_runs() -> None:
    run(
        """
        import flash_attn_mini.compat
        flash_attn_mini.compat.install()

        import torch
        from flash_attn import flash_attn_func, flash_attn_varlen_func
        from flash_attn.bert_padding import pad_input, unpad_input
        from flash_attn.layers.rotary import apply_rotary_emb

        angles = torch.outer(torch.arange(6.0), torch.tensor([1.0, 0.1]))
        q, k, v = torch.randn(3, 2, 6, 4, 8)
        q, k = (apply_rotary_emb(x, angles.cos(), angles.sin()) for x in (q, k))
        mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
        packed, indices, cu_seqlens, max_seqlen, _ = unpad_input(torch.stack([q, k, v], dim=2), mask)
        q_, k_, v_ = packed.unbind(1)
        out = flash_attn_varlen_func(q_, k_, v_, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)
        padded = pad_input(out, indices, 2, 6)
        torch.testing.assert_close(padded[1:], flash_attn_func(q[1:], k[1:], v[1:], causal=True))
        torch.testing.assert_close(padded[:1, :3], flash_attn_func(q[:1, :3], k[:1, :3], v[:1, :3], causal=True))
        assert not padded[0, 3:].any()
        """
    )


def test_version_checks_are_satisfied() -> None:
    run(
        """
        import importlib.metadata, importlib.util
        import flash_attn_mini.compat
        flash_attn_mini.compat.install()

        import flash_attn
        assert flash_attn.__version__ == "2.8.3"
        assert importlib.util.find_spec("flash_attn").name == "flash_attn"
        assert importlib.util.find_spec("flash_attn.bert_padding") is not None
        assert importlib.util.find_spec("flash_attn.losses") is None
        assert importlib.metadata.version("flash-attn") == importlib.metadata.version("flash_attn") == "2.8.3"
        assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
        assert importlib.metadata.version("torch")
        """
    )


def test_modules_that_this_package_lacks_are_not_found() -> None:
    run(
        """
        import flash_attn_mini.compat
        flash_attn_mini.compat.install()
        for missing in ("flash_attn.losses", "flash_attn.layers.patch_embed"):
            try:
                __import__(missing)
            except ModuleNotFoundError as error:
                assert missing in str(error)
            else:
                raise AssertionError(missing)
        """
    )


def test_says_what_it_does_once() -> None:
    result = run(
        """
        import flash_attn_mini.compat
        flash_attn_mini.compat.install()
        flash_attn_mini.compat.install()
        import flash_attn, sys
        assert len([finder for finder in sys.meta_path if "flash_attn_mini" in type(finder).__module__]) == 1
        """
    )
    lines = [line for line in result.stderr.splitlines() if line.startswith("[flash_attn_mini]")]
    assert len(lines) == 1
    assert "import flash_attn and flash_attn_2_cuda (2.8.3) now gives flash_attn_mini" in lines[0]


def test_importing_compat_changes_nothing() -> None:
    run(
        """
        import importlib.util, sys
        import flash_attn_mini.compat
        assert "flash_attn" not in sys.modules
        assert importlib.util.find_spec("flash_attn") is None
        """
    )


def test_uninstall_reverts_install() -> None:
    run(
        """
        import importlib.metadata, importlib.util, sys
        import flash_attn_mini.compat as compat
        before = list(sys.meta_path)
        compat.uninstall()  # nothing to undo
        compat.install()
        import flash_attn
        compat.uninstall()
        assert sys.meta_path == before
        assert importlib.util.find_spec("flash_attn") is None
        assert importlib.util.find_spec("flash_attn_2_cuda") is None
        try:
            importlib.metadata.version("flash-attn")
        except importlib.metadata.PackageNotFoundError:
            pass
        else:
            raise AssertionError
        compat.install()
        import flash_attn
        assert flash_attn.__version__ == "2.8.3"
        """
    )


@pytest.mark.parametrize("imported", [False, True], ids=["installed", "imported"])
def test_install_raises_if_the_official_package_exists(official: Path, imported: bool) -> None:
    run(
        f"""
        {"import flash_attn" if imported else ""}
        import flash_attn_mini.compat
        try:
            flash_attn_mini.compat.install()
        except RuntimeError as error:
            assert "official package" in str(error) and "force=True" in str(error), error
            assert {str(official)!r} in str(error), error
        else:
            raise AssertionError("installed")
        import flash_attn
        assert flash_attn.flash_attn_func == "the official one"
        """,
        official,
    )


def test_install_can_be_forced_over_the_official_package(official: Path) -> None:
    result = run(
        """
        import importlib.metadata
        import flash_attn.losses
        import flash_attn_mini.compat as compat
        theirs = flash_attn
        compat.install(force=True)
        import flash_attn
        assert flash_attn.flash_attn_func is compat._this.flash_attn_func
        assert importlib.metadata.version("flash-attn") == "2.8.3"
        try:
            import flash_attn.losses  # of the other package: never mixed
        except ModuleNotFoundError:
            pass
        else:
            raise AssertionError
        compat.uninstall()
        import flash_attn, flash_attn.losses
        assert flash_attn is theirs
        assert importlib.metadata.version("flash-attn") == "2.0.0"
        """,
        official,
    )
    assert f"instead of {official}" in result.stderr


def test_a_folder_of_that_name_is_not_the_official_package(tmp_path: Path) -> None:
    (tmp_path / "flash_attn").mkdir()
    run("import flash_attn_mini.compat; flash_attn_mini.compat.install()", tmp_path)


def test_transformers_takes_it_for_flash_attention_2() -> None:
    pytest.importorskip("transformers")
    run(
        """
        import flash_attn_mini.compat
        flash_attn_mini.compat.install()

        import torch
        from transformers.utils import import_utils
        import_utils.is_torch_cuda_available = lambda: True  # the only thing that is missing on this machine
        assert import_utils.is_flash_attn_2_available()
        assert import_utils.is_flash_attn_greater_or_equal("2.4.1")

        import transformers
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2
        )
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        tokens, mask = torch.randint(1, 99, (2, 9)), torch.ones(2, 9, dtype=torch.long)
        mask[0, :4] = 0
        expected = model(tokens, attention_mask=mask).logits
        model.config._attn_implementation = "flash_attention_2"  # set_attn_implementation looks for a GPU
        logits = model(tokens, attention_mask=mask).logits
        assert logits.dtype == torch.bfloat16
        torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=0.05, atol=0.02)
        """
    )
