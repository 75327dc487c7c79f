"""Numbers of a dataset's examples: on their way to the estimators, and what is refused."""

import pytest
import torch
from cases import WTA
from estimator_helpers import Plain

from rmm_linear import convert, revert
from rmm_linear.estimators import IndexedDataset, with_sample_index


def test_the_original_forward_never_sees_the_numbers():
    model, x = Plain().train(), torch.randn(3, 10, 8)
    convert(model, norm_estimator="constant", **WTA)
    model(x, sample_index=torch.tensor([5, 6, 7], dtype=torch.int32)).backward()
    ((call, _),) = model.layer.rmm_estimator.seen
    assert call.sample_index.tolist() == [5, 6, 7]
    model.eval()(x, sample_index=None)
    revert(model)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sample_index'"):
        model(x, sample_index=torch.arange(3))
    convert(model, norm_estimator="constant", **WTA)
    model.train()(x, sample_index=torch.arange(3)).backward()
    assert len(model.layer.rmm_estimator.seen) == 1


def test_a_forward_that_has_numbers_of_its_own_keeps_them():
    class Own(Plain):
        def forward(self, x, sample_index=None):
            assert sample_index.tolist() == [1, 2, 3]
            return super().forward(x)

    model = Own()
    convert(model, norm_estimator="constant", **WTA)
    model(torch.randn(3, 10, 8), sample_index=torch.tensor([1, 2, 3])).backward()
    assert model.layer.rmm_estimator.seen[0][0].sample_index.tolist() == [1, 2, 3]


@pytest.mark.parametrize("index", [torch.rand(3), torch.ones(3, 1, dtype=torch.long), torch.tensor(4), [True, False]])
def test_wrong_numbers_are_refused_and_the_model_goes_on(index):
    model, x = Plain(), torch.randn(3, 10, 8)
    convert(model, norm_estimator="constant", **WTA)
    with pytest.raises(TypeError, match="sample_index must have one integer for each example"):
        model(x, sample_index=index)
    model(x, sample_index=[1, 2]).backward()  # of another batch size: not used
    assert model.layer.rmm_estimator.seen[0][0].sample_index is None


def test_numbers_pass_by_a_collator_that_does_not_know_them():
    def collate(examples):
        assert all(set(example) == {"x"} for example in examples)
        return {"x": torch.stack([example["x"] for example in examples])}

    data = IndexedDataset([{"x": torch.full((2,), float(i))} for i in range(5)])
    loader = torch.utils.data.DataLoader(data, 2, shuffle=True, collate_fn=with_sample_index(collate), num_workers=1)
    for batch in loader:
        assert torch.equal(batch["x"][:, 0].long(), batch["sample_index"])
    assert "sample_index" not in with_sample_index(collate)([{"x": torch.ones(2)}])
    with pytest.raises(TypeError, match="An example must be a dictionary, got tuple"):
        IndexedDataset([(1, 2)])[0]
    with pytest.raises(TypeError, match="An example must be a dictionary, got tuple"):
        with_sample_index(collate)([(1, 2)])
    with pytest.raises(TypeError, match="The collator's batch must be a dictionary, got list"):
        with_sample_index(list)([data[0]])
    with pytest.raises(TypeError, match="dataset must have a length"):
        IndexedDataset(iter([]))
    with pytest.raises(TypeError, match="collator must make a batch"):
        with_sample_index(None)
