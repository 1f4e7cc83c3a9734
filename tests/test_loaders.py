"""What the command line is given by name: weights under the names that training leaves them."""

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from bayeszip.errors import ModelError
from bayeszip.loaders import load_weights


class Tied(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def test_tied_tensors_come_under_one_of_their_names(tmp_path):
    trained, network = Tied(0), Tied(1)
    save_model(trained, str(tmp_path / "w.safetensors"))
    load_weights(network, tmp_path / "w.safetensors")
    assert torch.equal(network.head.weight, trained.embed.weight)
    assert network.head.weight is network.embed.weight


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_what_a_wrapper_puts_in_front_of_names_does_not_count(prefix, tmp_path):
    trained, network = nn.Linear(3, 2), nn.Linear(3, 2)
    save_file({prefix + name: value for name, value in trained.state_dict().items()}, tmp_path / "w.safetensors")
    load_weights(network, tmp_path / "w.safetensors")
    assert torch.equal(network.weight, trained.weight)
    inner = nn.ModuleDict({"module": nn.Linear(3, 2)})
    if prefix == "module.":
        load_weights(inner, tmp_path / "w.safetensors")
    else:
        with pytest.raises(ModelError, match="Missing key"):
            load_weights(inner, tmp_path / "w.safetensors")


def test_weights_of_another_network_are_listed_by_name(tmp_path):
    save_file({"other.weight": torch.zeros(3, 2)}, tmp_path / "w.safetensors")
    with pytest.raises(ModelError) as caught:
        load_weights(nn.Linear(2, 3), tmp_path / "w.safetensors")
    headline, *found = str(caught.value).splitlines()
    assert headline.endswith("w.safetensors does not fit Linear:")
    assert [line.strip() for line in found] == [
        'Missing key(s) in state_dict: "weight", "bias".',
        'Unexpected key(s) in state_dict: "other.weight".',
    ]
