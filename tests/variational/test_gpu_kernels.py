"""The fused sums over all weights against float64 on a CPU: on a GPU, or with TRITON_INTERPRET=1 on a CPU too."""

import importlib.util
import os

import pytest
import torch

from bayeszip.variational.distributions import kl_log_uniform, log_alpha, log_mixture

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton"),
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no CUDA device"),
]


@pytest.mark.parametrize("size", [1, 1000, 1024, 100_003])
def test_kl(size):
    from bayeszip.variational.gpu_kernels import kl_with_slopes

    torch.manual_seed(size)
    theta = torch.randn(size) * torch.logspace(-8, 1, size)
    log_sigma2 = torch.empty(size).uniform_(-30, 10)
    exact = [tensor.double().requires_grad_() for tensor in (theta, log_sigma2)]
    value = kl_log_uniform(log_alpha(*exact)).sum() * 0.3
    value.backward()
    fused = kl_with_slopes(theta.to(DEVICE), log_sigma2.to(DEVICE), torch.tensor(0.3, device=DEVICE))
    within = log_alpha(*exact).detach().abs() < 49
    torch.testing.assert_close(fused[0].cpu().double(), value.detach(), rtol=1e-5, atol=1e-5)
    for slope, tensor in zip(fused[1:], exact, strict=True):
        torch.testing.assert_close(slope.cpu().double()[within], tensor.grad[within], rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("size", [1, 1000, 1024, 100_003])
def test_rate(size):
    from bayeszip.variational.gpu_kernels import rate_with_slopes

    torch.manual_seed(size)
    theta = torch.randn(size) * torch.logspace(-8, 1, size)
    log_sigma2, extra = torch.empty(size).uniform_(-30, 10), torch.empty(size).uniform_(0, 12)
    exact = [tensor.double().requires_grad_() for tensor in (theta, log_sigma2)]
    bits = (torch.sigmoid(-log_alpha(*exact)) * extra.double()).sum()
    bits.backward()
    fused = rate_with_slopes(*(tensor.to(DEVICE) for tensor in (theta, log_sigma2, extra)), torch.tensor(0.3))
    within = log_alpha(*exact).detach().abs() < 49
    torch.testing.assert_close(fused[0].cpu().double(), bits.detach(), rtol=1e-5, atol=1e-5)
    for slope, tensor in zip(fused[1:], exact, strict=True):
        torch.testing.assert_close(slope.cpu().double()[within], 0.3 * tensor.grad[within], rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("components", [1, 2, 17, 64])
def test_mixture(components):
    from bayeszip.variational.gpu_kernels import mixture_with_slopes

    torch.manual_seed(components)
    theta = torch.randn(50_001) * 0.1
    means = torch.linspace(-0.3, 0.3, components) if components > 1 else torch.zeros(1)
    log_precisions = torch.empty(components).uniform_(8, 10)
    log_proportions = torch.log_softmax(torch.randn(components), dim=0)
    exact = [tensor.double().requires_grad_() for tensor in (theta, means, log_precisions, log_proportions)]
    value = log_mixture(*exact).sum() * -0.01
    value.backward()
    fused, by_components, slope = mixture_with_slopes(
        *(tensor.to(DEVICE) for tensor in (theta, means, log_precisions, log_proportions)), -0.01
    )
    torch.testing.assert_close(fused.cpu().double(), value.detach(), rtol=1e-5, atol=1e-5)
    for ours, tensor in zip([slope, *by_components], exact, strict=True):
        scale = float(tensor.grad.abs().max())
        torch.testing.assert_close(ours.cpu().double(), tensor.grad, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (2, 3, 50, 60)])
def test_noise(dtype, shape):
    from bayeszip.variational.gpu_kernels import add_noise

    torch.manual_seed(0)
    mean, noise = torch.randn(shape, device=DEVICE).to(dtype), torch.randn(shape, device=DEVICE)
    variance = torch.rand(shape, device=DEVICE).square().to(dtype)
    deviation = (variance.double() + 1e-8).sqrt()
    expected, expected_ratio = mean.double() + noise * deviation, noise / (2 * deviation)
    sample, ratio = add_noise(mean, variance, noise, 1e-8)
    assert sample is mean
    assert sample.dtype == ratio.dtype == dtype
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(sample.double(), expected, **close)
    torch.testing.assert_close(ratio.double(), expected_ratio, **close)


@pytest.mark.parametrize("low", [False, True])
def test_products_add_their_noise_by_the_kernel(low, monkeypatch):
    from bayeszip.variational import gpu_kernels, sampling

    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return original(*arguments)

    original = gpu_kernels.add_noise
    monkeypatch.setattr(gpu_kernels, "add_noise", counted)
    torch.manual_seed(0)
    given = [torch.randn(shape, device=DEVICE) for shape in ((4, 2, 6, 6), (3, 2, 3, 3), (3, 2, 3, 3), (3,), (3,))]
    product = sampling.Convolution((1, 1), (1, 1), (1, 1), 1)
    results = []
    for by_kernel in (True, False):
        monkeypatch.setattr(sampling, "on_triton", lambda tensor, answer=by_kernel: answer)
        leaves = [part.clone().requires_grad_() for part in given]
        torch.manual_seed(1)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=low):
            output = sampling.sample_product(*leaves, product)
        results.append([output.detach(), *torch.autograd.grad(output.float().sum(), leaves)])
    assert len(calls) == 1
    for ours, theirs in zip(*results, strict=True):
        assert float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < (1e-2 if low else 1e-3)
