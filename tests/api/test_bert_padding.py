"""bert_padding: unpadding and padding again, concatenated sequences, gradients, masks of every dtype, wrong calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

# Left and right padding, a hole, an empty row, a full row.
ROWS = [[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
LENGTHS = [3, 2, 3, 0, 5]
CONCATENATED = [[2, 3, 0, 0, 0], [0, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [5, 0, 0, 0, 0]]
MASK = torch.tensor(ROWS)
DTYPES = [torch.bool, torch.int32, torch.int64, torch.uint8, torch.float32]


def hidden(*trailing: int, draw: torch.Generator) -> Tensor:
    return torch.randn(*MASK.shape, *trailing, dtype=torch.float64, generator=draw)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("trailing", [(), (4,), (2, 3)], ids=["token", "features", "heads"])
def test_unpad_input_keeps_the_tokens_of_the_mask(
    dtype: torch.dtype, trailing: tuple[int, ...], draw: torch.Generator
) -> None:
    states = hidden(*trailing, draw=draw)
    packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(states, MASK.to(dtype))
    assert torch.equal(packed, states[MASK.bool()])
    assert torch.equal(indices, MASK.flatten().nonzero().flatten())
    assert indices.dtype == torch.int64
    assert cu_seqlens.dtype == seqused.dtype == torch.int32
    assert cu_seqlens.tolist() == [0, 3, 5, 8, 8, 13]
    assert type(max_seqlen) is int
    assert max_seqlen == 5
    assert seqused.tolist() == LENGTHS


def test_pad_input_after_unpad_input_has_zeros_in_the_padding(draw: torch.Generator) -> None:
    states = hidden(2, 3, draw=draw)
    packed, indices, *_ = unpad_input(states, MASK)
    padded = pad_input(packed, indices, *MASK.shape)
    assert padded.shape == states.shape
    assert torch.equal(padded, states * MASK[:, :, None, None])


def test_unpad_input_after_pad_input_is_the_identity(draw: torch.Generator) -> None:
    packed = torch.randn(13, 4, dtype=torch.float64, generator=draw)
    indices = MASK.flatten().nonzero().flatten()
    again, indices_again, *_ = unpad_input(pad_input(packed, indices, *MASK.shape), MASK)
    assert torch.equal(again, packed)
    assert torch.equal(indices_again, indices)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_unused_tokens_are_kept_but_do_not_count(dtype: torch.dtype, draw: torch.Generator) -> None:
    used = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])  # a token of both masks is one token
    states = torch.randn(3, 4, 2, generator=draw)
    packed, _, cu_seqlens, max_seqlen, seqused = unpad_input(states, used.to(dtype), unused.to(dtype))
    assert torch.equal(packed, states[(used | unused).bool()])
    assert cu_seqlens.tolist() == [0, 3, 7, 7]
    assert max_seqlen == 4
    assert seqused.tolist() == [2, 1, 0]


def test_a_batch_of_strided_states(draw: torch.Generator) -> None:
    states = hidden(4, draw=draw).transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(unpad_input(states, MASK)[0], states[MASK.bool()])


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)], ids=str)
def test_empty_batches(shape: tuple[int, int]) -> None:
    packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(torch.zeros(*shape, 2), torch.zeros(shape).bool())
    assert packed.shape == (0, 2)
    assert max_seqlen == 0
    assert cu_seqlens.tolist() == [0] * (shape[0] + 1)
    assert seqused.tolist() == [0] * shape[0]
    assert pad_input(packed, indices, *shape).shape == (*shape, 2)


def test_sizes_may_be_numpy_integers() -> None:
    numpy = pytest.importorskip("numpy")
    padded = pad_input(torch.ones(2, 3), torch.tensor([0, 5]), numpy.int64(2), numpy.int32(4))
    assert padded.shape == (2, 4, 3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.float32], ids=str)
def test_concatenated_sequences(dtype: torch.dtype, draw: torch.Generator) -> None:
    """Rows of 0 to 4 sequences, with and without padding after them; 0 stands for no sequence at any place."""
    batch, seqlen = 5, 12
    states = torch.randn(batch, seqlen, 2, 3, dtype=torch.float64, generator=draw)
    lengths = torch.zeros(batch, seqlen, dtype=dtype)
    sequences, places = [], []
    for row in range(batch):
        begin = 0
        for place in torch.randperm(seqlen, generator=draw)[:row].sort().values:
            length = int(torch.randint(1, 4, (), generator=draw))
            lengths[row, place] = length
            sequences.append(states[row, begin : begin + length])
            places += [row * seqlen + begin + i for i in range(length)]
            begin += length
    packed, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(states, lengths)
    assert torch.equal(packed, torch.cat(sequences))
    assert (indices.tolist(), indices.dtype) == (places, torch.int64)
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.diff().tolist() == [len(sequence) for sequence in sequences]
    assert cu_seqlens[0] == 0
    assert type(max_seqlen) is int
    assert max_seqlen == max(len(sequence) for sequence in sequences)
    kept = torch.zeros(batch * seqlen).index_fill(0, torch.tensor(places), 1.0).view(batch, seqlen)
    assert torch.equal(pad_input(packed, indices, batch, seqlen), states * kept[:, :, None, None])


def test_a_batch_without_concatenated_sequences() -> None:
    packed, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(
        torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int)
    )
    assert (packed.shape, indices.shape, cu_seqlens.tolist(), max_seqlen) == ((0, 4), (0,), [0], 0)


def test_residual_is_a_view_of_the_input(draw: torch.Generator) -> None:
    states = torch.randn(5, 2, generator=draw)
    rows, residual = index_first_axis_residual(states, torch.tensor([4, 1]))
    assert torch.equal(rows, states[[4, 1]])
    assert residual.data_ptr() == states.data_ptr()
    assert torch.equal(residual, states)


def test_gradients_of_every_function(draw: torch.Generator) -> None:
    states = hidden(2, draw=draw).requires_grad_()

    def unpad(states: Tensor) -> Tensor:
        return unpad_input(states, MASK)[0]

    indices = MASK.flatten().nonzero().flatten()
    packed = unpad(states).detach().requires_grad_()
    for function, inputs in (
        (unpad, (states,)),
        (lambda packed: pad_input(packed, indices, *MASK.shape), (packed,)),
        (lambda packed: index_put_first_axis(packed, indices.int(), 40), (packed,)),
        (lambda packed: index_first_axis(packed, torch.tensor([3, 0, 3])), (packed,)),  # repeated rows add up
        (lambda packed: index_first_axis_residual(packed, torch.tensor([3, 0])), (packed,)),
        (lambda states: unpad_input_for_concatenated_sequences(states, torch.tensor(CONCATENATED))[0], (states,)),
    ):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_padding_gets_no_gradient(draw: torch.Generator) -> None:
    states = hidden(2, draw=draw).requires_grad_()
    unpad_input(states, MASK)[0].sum().backward()
    assert torch.equal(states.grad, MASK[:, :, None].expand_as(states).double())


def test_indices_of_unpad_input_pack_other_tensors(draw: torch.Generator) -> None:
    """User code packs labels and positions by the indices of the hidden states."""
    _, indices, *_ = unpad_input(hidden(2, draw=draw), MASK)
    labels = torch.arange(MASK.numel()).reshape(MASK.shape)
    assert torch.equal(index_first_axis(labels.flatten(0, 1), indices), labels[MASK.bool()])


def concatenated(lengths: list[list[Any]]) -> Any:
    return unpad_input_for_concatenated_sequences(torch.zeros(1, 2), torch.tensor(lengths))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: unpad_input(torch.zeros(2, 3), torch.ones(2, 4)), ValueError, r"attention_mask has shape \[2, 4\]"),
        (lambda: unpad_input(torch.zeros(2, 3), torch.ones(2, 3, 1)), ValueError, r"allowed: \[2, 3\]"),
        (lambda: unpad_input(torch.zeros(3), torch.ones(3)), ValueError, "hidden_states has shape"),
        (lambda: unpad_input(torch.zeros(2, 3), [[1, 1, 1]] * 2), TypeError, r"attention_mask is .*\(list\)"),
        (lambda: pad_input([1], torch.tensor([0]), 1, 1), TypeError, r"hidden_states is \[1\] \(list\)"),
        (lambda: unpad_input([1], MASK), TypeError, r"hidden_states is \[1\] \(list\); allowed: a torch.Tensor"),
        (lambda: unpad_input(torch.zeros(1, 2), torch.ones(1, 2).cfloat()), TypeError, "attention_mask is torch.comp"),
        (lambda: unpad_input(torch.zeros(1, 2), torch.ones(1, 2, device="meta")), ValueError, "mask is on meta"),
        (lambda: unpad_input(torch.zeros(1, 2), torch.tensor([[0.0, -1e9]])), ValueError, "added to scores"),
        (lambda: unpad_input(torch.zeros(1, 2), torch.tensor([[0, -10000]])), ValueError, "added to scores"),
        (
            lambda: unpad_input(torch.zeros(1, 3), torch.tensor([[2, 1, 0]])),
            ValueError,
            "or like lengths; allowed: bool",
        ),
        (lambda: unpad_input(torch.zeros(1, 2), torch.ones(1, 2), torch.ones(2, 1)), ValueError, "unused_mask has"),
        (lambda: concatenated([[2, 2]]), ValueError, "a row of 4 tokens; allowed: at most 2"),
        (lambda: concatenated([[-1, 1]]), ValueError, "attention_mask_in_length holds numbers that are no lengths"),
        (lambda: concatenated([[0.5, 1]]), ValueError, "attention_mask_in_length holds numbers that are no lengths"),
        (lambda: concatenated([[1, 1, 0]]), ValueError, r"attention_mask_in_length has shape \[1, 3\]"),
        (lambda: concatenated([[1j, 1]]), TypeError, "attention_mask_in_length is torch.complex64"),
        (lambda: pad_input(torch.zeros(2, 3), torch.tensor([0]), 1, 4), ValueError, "one for each of the 2 rows"),
        (lambda: pad_input(torch.zeros(1, 3), torch.tensor([0.0]), 1, 4), TypeError, "indices is torch.float32"),
        (lambda: pad_input(torch.zeros(1, 3), [0], 1, 4), TypeError, r"indices is \[0\] \(list\)"),
        (lambda: pad_input(torch.zeros(1, 3), torch.tensor([0]), -1, -4), ValueError, "batch is -1; allowed: 0 or"),
        (lambda: pad_input(torch.zeros(1, 3), torch.tensor([0]), 1, 4.0), TypeError, r"seqlen is 4.0 \(float\)"),
        (lambda: pad_input(torch.zeros(1, 3), torch.tensor([4]), 1, 4), IndexError, "index 4 is out of bounds"),
        (lambda: index_put_first_axis(torch.zeros(1, 3), torch.tensor([0]), -1), ValueError, "first_axis_dim is -1"),
        (lambda: index_first_axis([1], torch.tensor([0])), TypeError, "input is"),
        (lambda: index_first_axis(torch.zeros(2, 3), torch.tensor([[0]])), ValueError, "indices has shape"),
        (lambda: index_first_axis(torch.tensor(1.0), torch.tensor([0])), ValueError, "input has shape"),
    ],
)
def test_wrong_calls(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
