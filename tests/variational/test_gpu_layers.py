"""Fused layers against torch's: on a GPU, or with TRITON_INTERPRET=1 on a CPU where triton is installed."""

import importlib.util
import os

import pytest
import torch
import torch.nn.functional as F

from bayeszip.variational import to_variational, variational_weights

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton"),
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no CUDA device"),
]

FLOOR = 1e-8


@pytest.fixture(autouse=True)
def exact():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    torch.manual_seed(0)
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = before


def leaves(batch, channels, size, outputs, kernel, bias=True, noisy_bias=True):
    """Inputs, θ, log σ², bias and its log σ²; None for what is left out."""

    def normal(*shape):
        return torch.randn(*shape, device=DEVICE).requires_grad_()

    weight = (outputs, channels, *kernel)
    return [
        normal(batch, channels, *size),
        normal(*weight),
        normal(*weight),
        normal(outputs) if bias else None,
        normal(outputs) if bias and noisy_bias else None,
    ]


def expected(given, geometry, ratio):
    """The output by torch's convolutions, with the noise that `ratio` = ε / 2√variance tells of."""
    rest = (geometry.stride, geometry.padding, geometry.dilation)
    x, theta, log_sigma2, bias, bias_log_sigma2 = given
    of_bias = None if bias_log_sigma2 is None else bias_log_sigma2.exp()
    deviation = (F.conv2d(x.square(), log_sigma2.exp(), of_bias, *rest) + FLOOR).sqrt()
    noise = (2 * ratio * deviation).detach()
    return F.conv2d(x, theta, bias, *rest) + noise * deviation


CASES = {
    "convolution": {"batch": 3, "channels": 2, "size": (9, 8), "outputs": 5, "kernel": (3, 2)},
    "strided, padded, dilated": {"batch": 5, "channels": 3, "size": (7, 7), "outputs": 4, "kernel": (3, 3)},
    "linear": {"batch": 70, "channels": 40, "size": (1, 1), "outputs": 33, "kernel": (1, 1)},
    "one of all": {"batch": 1, "channels": 1, "size": (1, 1), "outputs": 1, "kernel": (1, 1)},
    "wide, its bias without noise": {
        "batch": 30,
        "channels": 1,
        "size": (9, 8),
        "outputs": 70,
        "kernel": (5, 5),
        "noisy_bias": False,
    },
    "without bias": {"batch": 3, "channels": 1, "size": (9, 8), "outputs": 5, "kernel": (5, 5), "bias": False},
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name):
    from bayeszip.variational.gpu_layers import Geometry, sample_by_patches

    more = ((2, 1), (1, 2), (1, 2)) if name.startswith("strided") else ()
    geometry = Geometry(CASES[name]["kernel"], *more)
    given = leaves(**CASES[name])
    output = sample_by_patches(*given, geometry, FLOOR)
    ratio = output.grad_fn.saved_tensors[-1]
    # From places × columns to the form of outputs.
    batch, outputs, height, width = output.shape
    ratio = ratio[:, :outputs].view(batch, height, width, outputs).movedim(3, 1)
    reference = expected(given, geometry, ratio)
    torch.testing.assert_close(output, reference, rtol=1e-4, atol=1e-4)
    pull = torch.randn_like(output)
    trained = [part for part in given if part is not None]
    ours = torch.autograd.grad((output * pull).sum(), trained)
    theirs = torch.autograd.grad((reference * pull).sum(), trained)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=2e-3, atol=2e-3)


def test_noise_is_standard_normal_and_new_each_time():
    from bayeszip.variational.gpu_layers import Geometry, sample_by_patches

    x = torch.ones(100, 1, 1, 1, device=DEVICE)
    theta, log_sigma2 = torch.zeros(50, 1, 1, 1, device=DEVICE), torch.zeros(50, 1, 1, 1, device=DEVICE)
    draws = [sample_by_patches(x, theta, log_sigma2, None, None, Geometry(), FLOOR) for _ in range(2)]
    for draw in draws:
        assert abs(float(draw.mean())) < 0.06
        assert abs(float(draw.std()) - 1) < 0.05
        assert abs(float((draw**4).mean()) - 3) < 0.5
    assert abs(float((draws[0] * draws[1]).mean())) < 0.06


@pytest.fixture
def calls(monkeypatch):
    """How often layers use the kernels, which they believe to be for this device."""
    from bayeszip.variational import gpu_layers, layers

    seen = []

    def counted(*arguments):
        seen.append(len(arguments))
        return original(*arguments)

    original = gpu_layers.sample_by_patches
    monkeypatch.setattr(gpu_layers, "sample_by_patches", counted)
    if INTERPRETED:
        monkeypatch.setattr(layers, "on_triton", lambda tensor: True)
    return seen


def test_layers_use_it(calls):
    network = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(64, 3))
    network.to(DEVICE)
    inputs = torch.randn(5, 2, 4, 4, device=DEVICE)
    stock = network(inputs)
    to_variational(network, log_sigma2=-40.0)
    network.train()
    # The floor under the variance is all the noise there is.
    torch.testing.assert_close(network(inputs), stock, rtol=1e-3, atol=2e-3)
    assert len(calls) == 2
    network(inputs).sum().backward()
    assert all(weight.log_sigma2.grad is not None for weight in variational_weights(network))


def test_what_it_is_not_for_is_left_to_torch(calls):
    linear, convolution = torch.nn.Linear(8, 3).to(DEVICE), torch.nn.Conv2d(2, 4, 3).to(DEVICE)
    for layer in (linear, convolution):
        to_variational(layer)
        layer.train()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(torch.ones(4, 16, device=DEVICE))
    with pytest.raises(RuntimeError, match="channels"):
        convolution(torch.ones(1, 3, 4, 4, device=DEVICE))
    with pytest.raises(RuntimeError, match=r"[Kk]ernel size"):
        convolution(torch.ones(1, 2, 2, 2, device=DEVICE))
    assert linear(torch.ones(0, 8, device=DEVICE)).shape == (0, 3)
    assert not calls
    assert linear(torch.ones(2, 5, 8, device=DEVICE)).shape == (2, 5, 3)
    assert len(calls) == 1


def test_channels_that_come_last_are_left_to_torch(calls):
    layer = torch.nn.Conv2d(2, 4, 3).to(DEVICE)
    to_variational(layer)
    inputs = torch.randn(5, 2, 6, 6, device=DEVICE).contiguous(memory_format=torch.channels_last)
    output = layer.train()(inputs)
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert not calls


def test_it_keeps_no_patches():
    from bayeszip.variational.gpu_layers import Geometry, sample_by_patches

    given = leaves(3, 2, (6, 6), 2, (3, 3))
    output = sample_by_patches(*given, Geometry((3, 3)), FLOOR)
    kept = output.grad_fn.saved_tensors
    own = [part.data_ptr() for part in given]
    assert [tensor.numel() for tensor in kept if tensor.data_ptr() not in own] == [3 * 4 * 4 * 4]


def test_it_has_no_second_derivative():
    from bayeszip.variational.gpu_layers import Geometry, sample_by_patches

    given = leaves(3, 2, (4, 4), 2, (3, 3))
    output = sample_by_patches(*given, Geometry((3, 3)), FLOOR)
    (slope,) = torch.autograd.grad(output.square().sum(), given[1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()
