"""Batches of other lengths: what follows the sequence, what stays, and what is refused."""

import pytest
import torch
from helpers import tiny_model

from rmm_linear.planning.step.resize import length_of, lengthened, resized, usable_positions

IDS = torch.tensor([[5, 6, 7, 8], [9, 3, 1, 1]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def test_ids_labels_and_padding_follow_the_sequence():
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": torch.tensor([0, 1]), "scale": 2.0}
    longer = lengthened(batch, 8)
    assert longer["input_ids"].tolist() == [[5, 5, 6, 6, 7, 7, 8, 8], [9, 9, 3, 3, 1, 1, 1, 1]]
    assert longer["attention_mask"].float().mean() == MASK.float().mean()
    assert longer["labels"] is batch["labels"]
    assert longer["scale"] == 2.0
    assert lengthened(batch, 2)["input_ids"].tolist() == [[5, 7], [9, 1]]
    assert length_of(longer) == 8


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("inputs_embeds", torch.ones(2, 4, 4), (2, 7, 4)),
        ("attention_mask", torch.ones(2, 1, 4, 4), (2, 1, 7, 7)),
        ("attention_mask", torch.ones(2, 1, 1, 4), (2, 1, 1, 7)),
        ("mask", torch.ones(1, 4, 4, dtype=torch.bool), (1, 7, 7)),
        ("weights", torch.ones(2, 4), (2, 7)),
        ("decoder_input_ids", torch.ones(2, 3, dtype=torch.long), (2, 3)),
        ("labels", torch.ones(2), (2,)),
        ("cache_position", torch.arange(4), (7,)),
    ],
)
def test_tensors_follow_by_their_shape(name, tensor, shape):
    assert lengthened({"input_ids": IDS, name: tensor}, 7)[name].shape == shape


def test_a_tensor_and_a_sequence_of_tensors_are_batches():
    assert lengthened(IDS, 6).shape == (2, 6)
    assert lengthened(torch.ones(2, 4, 3), 6).shape == (2, 6, 3)
    assert [tensor.shape for tensor in lengthened((IDS, MASK), 6)] == [(2, 6), (2, 6)]
    assert lengthened(IDS.to("meta"), 10**6).shape == (2, 10**6)


def test_positions_count_on_from_where_a_text_begins():
    given = torch.tensor([[0, 1, 2, 3], [2, 3, 0, 1]])
    found = lengthened({"input_ids": IDS, "position_ids": given}, 8)["position_ids"]
    assert found.tolist() == [[*range(8)], [2, 3, 4, 5, 0, 1, 2, 3]]
    shared = lengthened({"input_ids": IDS.to("meta"), "position_ids": torch.empty(1, 4, device="meta")}, 8)
    assert shared["position_ids"].shape == (1, 8)


@pytest.mark.parametrize(
    ("example", "text"),
    [
        (lambda: IDS, "a function as the example does not allow"),
        ({"input_ids": IDS, "pixel_values": torch.ones(2, 3, 8, 8)}, r"got pixel_values of shape \(2, 3, 8, 8\)"),
        ({"input_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 2])}, "got 'cu_seq_lens_q', by which texts share a row"),
        (torch.ones(4, 3), "must have sequences, integers of shape"),
        ({"input_ids": torch.ones(0, 4)}, "of one row or more"),
    ],
)
def test_what_cannot_be_longer_is_refused(example, text):
    with pytest.raises(ValueError, match=text):
        lengthened(example, 8)


def test_sequences_are_repeated():
    assert resized({"input_ids": IDS, "scale": torch.ones(3)}, 3)["input_ids"].tolist() == [*IDS.tolist(), [5, 6, 7, 8]]


@pytest.mark.parametrize(
    ("architecture", "positions"), [("roberta", 38), ("bert", 40), ("gpt2", 40), ("llama", None), ("t5", None)]
)
def test_tables_of_positions_bound_a_sequence(architecture, positions):
    """RoBERTa's first two rows are those of padding, and of what precedes it."""
    assert usable_positions(tiny_model(architecture)) == positions
