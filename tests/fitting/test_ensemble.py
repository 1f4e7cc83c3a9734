"""Networks trained together end where each would alone."""

import contextlib
import copy
import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from bayeszip.data import Batches
from bayeszip.errors import DataError, ModelError, RecipeError
from bayeszip.fitting import Phase, Watcher, ensemble, fit, recorded
from bayeszip.fitting.ensemble import Member, close_together, fit_together
from bayeszip.fitting.shared_values import SharedValues
from bayeszip.tensors import QuantizedTensor
from bayeszip.variational import MixturePrior, to_stock, to_variational, variational_weights

SIZE = 150

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
TOLERANCE = {"cpu": 2e-3, "cuda": 0.02}
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Sequential(
        nn.Conv2d(1, 4, (3, 2), stride=(1, 2), padding=(1, 0), dilation=(2, 1)),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 3 * 2, 5),
    )
    to_variational(layers, log_sigma2=-6.0)
    return layers


@cache
def data(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SIZE, 1, 8, 8, generator=generator)
    targets = inputs.flatten(1)[:, :5].argmax(dim=1)
    return inputs.to(device), targets.to(device)


def batches(seed: int, device: str = "cpu") -> Batches:
    return Batches(*data(device), 16, shuffle=True, seed=seed)


PHASES = (
    Phase("one", epochs=2, noise=False, weight_decay=1e-3, rate_theta=1e-2, schedule="linear", distillation=0.5),
    Phase("two", epochs=2, noise=False, tau2=0.3, rate_theta=5e-3, rate_means=1e-3),
    Phase("three", epochs=2, noise=False, tau2=0.3, rate_theta=5e-3, reseed=True, std_first=0.1, std_last=0.05),
    Phase("four", epochs=2, noise=False, tau2=0.3, rate_theta=5e-3, rate_log_precisions=1e-2),
)


def settings(index: int) -> tuple[Phase, ...]:
    """Other numbers for each member."""
    return tuple(dataclasses.replace(phase, rate_theta=phase.rate_theta * (index + 1)) for phase in PHASES)


class Zeros(Watcher):
    """Keeps the share of zeros of every epoch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_epoch(self, stats, *state) -> None:
        self.seen.append(stats.zeros)


@pytest.mark.parametrize("device", DEVICES)
def test_without_noise_each_ends_where_it_would_alone(device, monkeypatch):
    # On a GPU the matrix products of both are exact, or they would part.
    monkeypatch.setattr(ensemble, "reduced_precision", contextlib.nullcontext)
    monkeypatch.setattr(recorded, "reduced_precision", contextlib.nullcontext)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    alone, together, shares = [], [], []
    for index in range(3):
        teacher = network(10 + index).eval().to(device)
        member = Member(network(index), batches(index, device), settings(index), MixturePrior(5, 0.2).to(device))
        member.network.to(device)
        with torch.no_grad():
            member.taught = teacher(member.batches.inputs)
        together.append(member)
        one, prior = copy.deepcopy(member.network), copy.deepcopy(member.prior)
        zeros = Zeros()
        fit(one, batches(index, device), settings(index), n_data=SIZE, prior=prior, teacher=teacher, watcher=zeros)
        alone.append((one, prior))
        shares.append(zeros.seen)
    fit_together(together, n_data=SIZE, validation=batches(0, device))
    for index, (member, (one, prior)) in enumerate(zip(together, alone, strict=True)):
        ours, theirs, start = (
            nn.utils.parameters_to_vector(trained.parameters()).cpu()
            for trained in (member.network, one, network(index))
        )
        # Adam turns differences in the last bits of a small gradient into some of its steps.
        assert (ours - theirs).norm() < TOLERANCE[device] * (theirs - start).norm()
        for our, their in zip(member.prior.parameters(), prior.parameters(), strict=True):
            torch.testing.assert_close(our, their, rtol=2e-3, atol=2 * TOLERANCE[device])
        assert [stats.phase for stats in member.history] == [phase.name for phase in PHASES for _ in range(2)]
        assert member.prior.hyper_rate == pytest.approx(prior.hyper_rate.item())
        assert 0 < member.history[-1].accuracy <= 1
        assert [stats.zeros for stats in member.history] == pytest.approx(shares[index], abs=0.02)


def test_noise_and_divergence_prune():
    phases = [Phase("vd", epochs=30, tau1=3.0, rate_theta=1e-3, rate_log_sigma2=0.1)]
    members = [Member(network(0), batches(index), phases) for index in range(2)]
    fit_together(members, n_data=SIZE)
    zeros = [member.history[-1].zeros for member in members]
    assert min(zeros) > 0.3
    assert members[0].history[0].kl > members[0].history[-1].kl > 0
    first, second = (next(variational_weights(member.network)).theta for member in members)
    assert not torch.equal(first, second)  # same start, other batches and noise


def test_shared_values_trained_together_end_where_each_would_alone():
    phase = Phase("values", epochs=2, noise=False, rate_theta=1e-2, schedule="linear")
    members, symbols, expected = [], [], []
    for index in range(2):
        plain = to_stock(network(index))
        codebook = np.array([0, -0.3, 0.1, 0.4, 0.6][: 4 + index], np.float32)
        generator = np.random.default_rng(index)
        tensors = {
            name: QuantizedTensor(generator.integers(0, len(codebook), parameter.shape), codebook)
            for name, parameter in plain.named_parameters()
        }
        members.append(Member(plain, batches(index), [phase]))
        symbols.append(tensors)
        shared = SharedValues(copy.deepcopy(plain), tensors)
        fit(shared, batches(index), [phase], n_data=SIZE)
        expected.append(shared.codebook())
    codebooks = close_together(members, symbols, n_data=SIZE)
    for ours, theirs, member, tensors in zip(codebooks, expected, members, symbols, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
        weights = QuantizedTensor(tensors["4.weight"].symbols, ours).dequantize()
        np.testing.assert_allclose(member.network[4].weight.detach(), weights, rtol=1e-6)


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_noise_differs_from_network_to_network_and_from_step_to_step():
    phase = Phase("noise", epochs=3, rate_theta=0.0, rate_log_sigma2=0.0)
    inputs, targets = torch.ones(320, 1, 8, 8).cuda(), torch.zeros(320, dtype=torch.int64).cuda()
    members = []
    for _ in range(2):
        noisy = network(0).cuda()
        for weight in variational_weights(noisy):
            weight.log_sigma2.data.fill_(1.0)
        members.append(Member(noisy, Batches(inputs, targets, 32, shuffle=True), [phase]))
    fit_together(members, n_data=320)
    assert len({stats.nll for member in members for stats in member.history}) == 6


def test_what_can_t_be_trained_together():
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    phase = Phase("one", epochs=1, noise=False)
    with pytest.raises(ModelError, match="same parameters"):
        fit_together([Member(network(0), batches(0), [phase]), Member(other, batches(1), [phase])], n_data=SIZE)
    elsewhere = Batches(*(part.clone() for part in data()), 16, shuffle=True)
    larger = Batches(*data(), 32, shuffle=True)
    for other_batches in (elsewhere, larger):
        with pytest.raises(DataError, match="the same data, in batches of one size"):
            fit_together(
                [Member(network(0), batches(0), [phase]), Member(network(1), other_batches, [phase])], n_data=SIZE
            )
    frozen = network(0)
    frozen[0].weight.requires_grad_(False)
    with pytest.raises(ModelError, match="frozen"):
        fit_together([Member(frozen, batches(0), [phase])], n_data=SIZE)
    noisy = dataclasses.replace(phase, noise=True)
    with pytest.raises(RecipeError, match="in numbers only"):
        fit_together([Member(network(0), batches(0), [p]) for p in (phase, noisy)], n_data=SIZE)
    buffered = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 5))
    with pytest.raises(ModelError, match="buffers"):
        fit_together([Member(buffered, batches(0), [phase])], n_data=SIZE)
    mixed = dataclasses.replace(phase, tau2=0.1)
    with pytest.raises(RecipeError, match="mixture"):
        fit_together([Member(network(0), batches(0), [mixed])], n_data=SIZE)
