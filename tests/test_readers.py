"""Who reads what while a network computes, in several threads too."""

import threading

import torch
from torch import nn

from bayeszip.readers import reading


class Mirrored(nn.Module):
    """Decodes by the weights that it encodes with."""

    def __init__(self):
        super().__init__()
        self.enc, self.out = nn.Linear(3, 4), nn.Linear(3, 2)

    def forward(self, inputs):
        return self.out(nn.functional.linear(self.enc(inputs), self.enc.weight.t()))


def test_who_multiplies_by_a_weight_reads_it():
    network = Mirrored()
    with reading(network) as readers:
        network(torch.randn(2, 3))
    assert readers.called == {id(network), id(network.enc), id(network.out)}
    assert readers.of(network.enc.weight) == {id(network), id(network.enc)}
    assert readers.are_elsewhere(network.enc)
    assert not readers.are_elsewhere(network.out)


def test_nothing_stays_of_a_reading_that_fails():
    network, fused = nn.Linear(3, 2), torch.backends.mha.get_fastpath_enabled()
    try:
        with reading(network):
            network(torch.randn(2, 4))
    except RuntimeError:
        pass
    assert not network._forward_hooks
    assert not network._forward_pre_hooks
    assert torch.backends.mha.get_fastpath_enabled() == fused


def test_readings_of_two_threads_leave_the_switches_as_they_were():
    """The first ends while the second is under way."""
    begun, overlaps, ended = (threading.Event() for _ in range(3))
    seen = []

    def first():
        with reading(nn.Linear(2, 2)):
            begun.set()
            overlaps.wait(10)
        ended.set()

    def second():
        begun.wait(10)
        with reading(nn.Linear(2, 2)):
            overlaps.set()
            ended.wait(10)
            seen.append(torch.backends.mha.get_fastpath_enabled())

    fused = torch.backends.mha.get_fastpath_enabled()
    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [False]
    assert torch.backends.mha.get_fastpath_enabled() == fused
