"""Statistics of batch norms taken anew: a plain average without noise, and nothing else changed by it."""

import copy
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bayeszip.fitting import ResidentBatches
from bayeszip.fitting.statistics import renew_statistics


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).eval()


def tensors():
    torch.manual_seed(1)
    return torch.randn(64, 4) * 3 + 1, torch.arange(64) % 2


def test_they_are_those_of_the_network_as_it_is():
    net, (inputs, targets) = network(), tensors()
    renew_statistics(net, [(inputs, targets)])
    hidden = net[0](inputs)
    torch.testing.assert_close(net[1].running_mean, hidden.mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(net[1].running_var, hidden.var(0), rtol=1e-5, atol=1e-5)
    assert not net.training
    assert net[1].momentum == 0.1


def test_rows_that_lie_sorted_are_shown_mixed():
    """Batches of one class alone have other variances than what the network is shown."""
    net, (inputs, _) = network(), tensors()
    classes = torch.arange(64) // 32
    resident = ResidentBatches(inputs + 40 * classes[:, None], classes, 16, shuffle=True)
    renew_statistics(net, resident)
    whole = net[0](resident.inputs).var(0)
    assert (net[1].running_var > 0.5 * whole).all()


def test_norms_that_a_network_keeps_in_eval_and_such_that_nothing_passes_keep_theirs():
    class Stubborn(nn.Sequential):
        def train(self, mode: bool = True):
            super().train(mode)
            self[1].eval()
            return self

    net = Stubborn(*network())
    net.add_module("unused", nn.BatchNorm1d(3))
    net.forward = lambda inputs: net[3](net[2](net[1](net[0](inputs))))
    for norm in (net[1], net.unused):
        norm.running_mean.fill_(2.0)
        norm.num_batches_tracked.fill_(7)
    renew_statistics(net, [tensors()])
    for norm in (net[1], net.unused):
        assert (norm.running_mean == 2).all()
        assert norm.num_batches_tracked == 7


def test_neither_the_loader_nor_random_numbers_notice():
    inputs, targets = tensors()
    shuffled = DataLoader(TensorDataset(inputs, targets), 16, shuffle=True, generator=torch.Generator().manual_seed(3))
    for loader in (ResidentBatches(inputs, targets, 16, shuffle=True, seed=3), shuffled):
        first, again = network(), network()
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        orders = []
        renew_statistics(first, loader)
        orders.append([y.tolist() for _, y in loader])
        renew_statistics(again, loader)
        # Whenever it is asked, it looks at the same batches.
        assert torch.equal(first[1].running_var, again[1].running_var)
        assert sorted(label for batch in orders[0] for label in batch) == sorted(targets.tolist())
        torch.manual_seed(5)
        renew_statistics(first, loader)
        assert torch.equal(torch.rand(3), expected)


class Noisy(Dataset):
    """Draws from random numbers that are not torch's."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        inputs, targets = ROWS
        return inputs[index] * (random.random() + np.random.rand()), targets[index]  # noqa: NPY002


ROWS = tensors()


def test_data_may_draw_from_all_random_numbers():
    loader, found = DataLoader(Noisy(), 16), []
    for seed in (1, 2):
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        before = np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002
        net = network()
        renew_statistics(net, loader)
        found.append(net[1].running_var)
        after = np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002
        assert str(after) == str(before)
    assert torch.equal(*found)


def test_networks_without_norms_are_not_looked_at():
    plain = nn.Linear(4, 2)
    before = copy.deepcopy(plain.state_dict())

    def refuse():
        raise AssertionError("asked for batches")
        yield

    renew_statistics(plain, refuse())
    assert all(torch.equal(before[name], value) for name, value in plain.state_dict().items())
