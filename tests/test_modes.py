"""Networks that were looked at, or trained, are in the modes that they were in, module by module."""

import pytest
import torch
from torch import nn

from bayeszip.modes import evaluating, set_training, trained_norms, training, unfreeze


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.Dropout(), nn.BatchNorm2d(4)))


def modes(net: nn.Module) -> list[bool]:
    return [part.training for part in net.modules()]


@pytest.mark.parametrize("mode", [evaluating, training])
@pytest.mark.parametrize("of_root", [True, False])
def test_each_module_is_left_as_it_was_even_after_an_error(mode, of_root):
    net = network().train(of_root)
    net[1].train(not of_root)
    before = modes(net)
    with mode(net):
        assert modes(net) == [mode is training] * len(before)
    assert modes(net) == before
    with pytest.raises(ZeroDivisionError), mode(net):
        raise ZeroDivisionError
    assert modes(net) == before


def test_frozen_norms_are_not_trained():
    net = network()
    net[1].requires_grad_(False)
    set_training(net.eval())
    assert [part.training for part in (net, net[0], net[1], net[2][0], net[2][1])] == [True, True, False, True, True]
    assert trained_norms(net) == [net[2][1]]


def test_a_norm_without_parameters_is_frozen_with_what_it_is_in():
    net = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False)), nn.Linear(4, 2))
    assert trained_norms(net) == [net[0][1]]
    net[0].requires_grad_(False)
    assert trained_norms(net) == []


def test_a_norm_without_parameters_has_nothing_to_freeze():
    net = nn.Sequential(nn.BatchNorm2d(4, affine=False))
    set_training(net)
    assert net[0].training
    assert trained_norms(net) == [net[0]]


def test_what_has_no_gradients_stays_frozen():
    net = network().requires_grad_(False)
    net.register_parameter("count", nn.Parameter(torch.tensor([3]), requires_grad=False))
    unfreeze(net)
    assert [name for name, each in net.named_parameters() if not each.requires_grad] == ["count"]
