"""Steps recorded on a GPU end where steps taken one by one do."""

import contextlib

import pytest
import torch
from torch import nn

from bayeszip.fitting import Phase, ResidentBatches, Watcher, fit
from bayeszip.fitting import loop as fitting_loop
from bayeszip.fitting import recorded as recorded_steps
from bayeszip.fitting.recorded import can_be_recorded
from bayeszip.variational import Divergence, MixturePrior, to_variational

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def data(device: str) -> ResidentBatches:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(330, 12, generator=generator)
    targets = inputs[:, :4].argmax(dim=1)
    return ResidentBatches(inputs.to(device), targets.to(device), 32, shuffle=True, seed=1)


def trained(device: str, noise: bool) -> tuple[nn.Module, MixturePrior]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 4)).to(device)
    to_variational(network)
    prior = MixturePrior(5, 0.2).to(device)
    phases = [
        Phase("first", epochs=3, noise=noise, tau1=float(noise), tau1_ramp=0.5, rate_theta=1e-2, schedule="linear"),
        Phase(
            "second", epochs=3, noise=noise, tau2=0.1, rate_theta=1e-2, rate_means=1e-2, std_first=0.1, std_last=0.05
        ),
    ]
    fit(network, data(device), phases, n_data=330, terms=(Divergence(), prior))
    return network, prior


@pytest.mark.gpu
@needs_gpu
def test_recorded_steps_are_the_same_steps(monkeypatch):
    monkeypatch.setattr(recorded_steps, "reduced_precision", contextlib.nullcontext)
    recorded, its_prior = trained("cuda", noise=False)
    monkeypatch.setattr(fitting_loop, "can_be_recorded", lambda batches, device: False)
    plain, prior = trained("cuda", noise=False)
    for ours, theirs in zip(recorded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(its_prior.means, prior.means, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@needs_gpu
def test_every_replay_draws_noise_of_its_own():
    class Losses(Watcher):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_epoch(self, stats, course) -> None:
            self.seen.append(stats.parts["data"])

    network = nn.Sequential(nn.Linear(12, 4)).cuda()
    to_variational(network, log_sigma2=1.0)
    # All rows are alike and nothing is trained, so that the noise alone makes the epochs differ.
    alike = ResidentBatches(torch.ones(320, 12).cuda(), torch.zeros(320, dtype=torch.int64).cuda(), 32, shuffle=True)
    losses = Losses()
    phase = Phase("noise", epochs=4, rate_theta=0.0, rate_log_sigma2=0.0)
    fit(network, alike, [phase], n_data=320, watcher=losses)
    assert len(set(losses.seen[1:])) == 3
    assert network[0].generator is None


def test_what_is_recorded():
    resident = data("cpu")
    assert not can_be_recorded(resident, torch.device("cpu"))
    assert not can_be_recorded([(torch.ones(2), torch.ones(2))], torch.device("cuda"))
    assert not can_be_recorded(resident, torch.device("cuda"))
