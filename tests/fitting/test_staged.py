"""Steps on batches of any loader: on a GPU they are recorded too, and end where steps taken one by one do."""

import contextlib
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bayeszip.fitting import Fitting, Phase, Watcher, staged
from bayeszip.fitting.batches import laid_out
from bayeszip.fitting.engine import SingleProcess
from bayeszip.fitting.recorded import host_random_state
from bayeszip.variational import to_variational

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
N, SIZE = 330, 32


class Warnings(Watcher):
    def __init__(self) -> None:
        self.said: list[str] = []

    def on_warning(self, message: str) -> None:
        self.said.append(message)


def loader(workers: int = 0) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(N, 3, 8, 8, generator=generator)
    targets = inputs.mean(dim=(2, 3)).argmax(dim=1)
    order = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(inputs, targets), SIZE, shuffle=True, num_workers=workers, generator=order)


def trained(monkeypatch, batches, *, recorded: bool, network=None, noise: bool = False, **settings) -> Fitting:
    torch.manual_seed(0)
    if network is None:
        network = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 3),
        )
    to_variational(network.cuda())
    phase = Phase("p", epochs=3, noise=noise, tau1=float(noise), rate_theta=1e-2, schedule="linear")
    fitting = Fitting(network, batches, [phase], n_data=N, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(staged, "reduced_precision", contextlib.nullcontext)
        patch.setattr("bayeszip.fitting.recorded.reduced_precision", contextlib.nullcontext)
        if not recorded:
            patch.setattr(Fitting, "_is_recorded", lambda self: False)
        fitting.run()
    return fitting


def assert_alike(first: Fitting, second: Fitting) -> None:
    for ours, theirs in zip(first.network.parameters(), second.network.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("where", ["host", "device", "workers"])
def test_staged_steps_are_the_same_steps(monkeypatch, where):
    def batches() -> object:
        if where == "device":
            return [(inputs.cuda(), targets.cuda()) for inputs, targets in loader()]
        return loader(2 if where == "workers" else 0)

    warnings = Warnings()
    replayed = trained(monkeypatch, batches(), recorded=True, watcher=warnings)
    assert warnings.said == []
    assert_alike(replayed, trained(monkeypatch, batches(), recorded=False))
    assert replayed.steps == 3 * -(-N // SIZE)


@pytest.mark.gpu
@needs_gpu
def test_in_bf16_and_in_parts_they_are_recorded_too(monkeypatch):
    engine = SingleProcess(torch.device("cuda"), "bf16", accumulate=2)
    warnings = Warnings()
    ours = trained(monkeypatch, loader(), recorded=True, engine=engine, watcher=warnings)
    assert warnings.said == []
    theirs = trained(monkeypatch, loader(), recorded=False, engine=engine)
    for one, other in zip(ours.network.parameters(), theirs.network.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.05)


@pytest.mark.gpu
@needs_gpu
def test_a_network_that_draws_on_the_host_is_not_recorded(monkeypatch):
    class Fickle(nn.Module):
        def forward(self, input):
            return input * (1.0 if not self.training or random.random() < 0.5 else 0.5)

    warnings = Warnings()
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 3), Fickle())
    trained(monkeypatch, loader(), recorded=True, network=network, watcher=warnings)
    assert any("random numbers on the host" in message for message in warnings.said)


@pytest.mark.gpu
@needs_gpu
def test_a_loss_that_asks_the_gpu_is_not_recorded_and_counts(monkeypatch):
    def loss(outputs, targets):
        value = F.cross_entropy(outputs, targets)
        return value * (2.0 if value.item() > 0 else 1.0)

    warnings = Warnings()
    ours = trained(monkeypatch, loader(), recorded=True, loss=loss, watcher=warnings)
    assert len(warnings.said) == 1
    assert "one by one" in warnings.said[0]
    assert_alike(ours, trained(monkeypatch, loader(), recorded=False, loss=loss))


@pytest.mark.gpu
@needs_gpu
def test_a_transform_of_ones_own_changes_every_batch(monkeypatch):
    seen = []

    def transform(inputs):
        seen.append(inputs.device.type)
        return inputs + 0.01 * random.random()

    trained(monkeypatch, loader(), recorded=True, augment=transform)
    assert seen == ["cuda"] * (3 * -(-N // SIZE))


def test_draws_on_the_host_are_noticed():
    before = host_random_state()
    assert host_random_state() == before
    for draw in (lambda: torch.rand(()), random.random, lambda: np.random.rand()):  # noqa: NPY002
        before = host_random_state()
        draw()
        assert host_random_state() != before


def test_images_are_laid_out_for_bf16_on_a_gpu_alone():
    images = torch.zeros(2, 3, 4, 4)
    assert laid_out(images) is images
    with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):
        assert laid_out(images) is images  # not on the GPU
        if torch.cuda.is_available():
            images, others = laid_out((images.cuda(), torch.zeros(2, 3).cuda()))
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert others.is_contiguous()
