"""Fused layers against torch's: on a GPU, or with TRITON_INTERPRET=1 on a CPU where triton is installed."""

import importlib.util
import os

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, vmap

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


def leaves(members, batch, channels, size, outputs, kernel, noisy=True, bias=True, noisy_bias=True):
    """Inputs, θ, log σ², bias and its log σ² of some networks; None for what is left out."""

    def normal(*shape):
        return torch.randn(members, *shape, device=DEVICE).requires_grad_()

    weight = (outputs, channels, *kernel)
    return [
        normal(batch, channels, *size),
        normal(*weight),
        normal(*weight) if noisy else None,
        normal(outputs) if bias else None,
        normal(outputs) if bias and noisy and noisy_bias else None,
    ]


def expected(given, geometry, ratio):
    """The output by torch's convolutions, with the noise that `ratio` = ε / 2√variance tells of."""
    rest = (geometry.stride, geometry.padding, geometry.dilation)
    outputs = []
    for member in range(len(given[0])):
        x, theta, log_sigma2, bias, bias_log_sigma2 = (None if part is None else part[member] for part in given)
        output = F.conv2d(x, theta, bias, *rest)
        if log_sigma2 is not None:
            of_bias = None if bias_log_sigma2 is None else bias_log_sigma2.exp()
            deviation = (F.conv2d(x.square(), log_sigma2.exp(), of_bias, *rest) + FLOOR).sqrt()
            noise = (2 * ratio[member] * deviation).detach()
            output = output + noise * deviation
        outputs.append(output)
    return torch.stack(outputs)


CASES = {
    "convolution": {"members": 2, "batch": 3, "channels": 2, "size": (9, 8), "outputs": 5, "kernel": (3, 2)},
    "strided, padded, dilated": {
        "members": 1,
        "batch": 5,
        "channels": 3,
        "size": (7, 7),
        "outputs": 4,
        "kernel": (3, 3),
    },
    "linear": {"members": 3, "batch": 70, "channels": 40, "size": (1, 1), "outputs": 33, "kernel": (1, 1)},
    "wide, its bias without noise": {
        "members": 2,
        "batch": 30,
        "channels": 1,
        "size": (9, 8),
        "outputs": 70,
        "kernel": (5, 5),
        "noisy_bias": False,
    },
    "without bias": {
        "members": 2,
        "batch": 3,
        "channels": 1,
        "size": (9, 8),
        "outputs": 5,
        "kernel": (5, 5),
        "bias": False,
    },
    "without noise": {
        "members": 2,
        "batch": 3,
        "channels": 2,
        "size": (9, 8),
        "outputs": 5,
        "kernel": (3, 2),
        "noisy": False,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name):
    from bayeszip.variational.gpu_layers import Geometry, _Layer

    more = ((2, 1), (1, 2), (1, 2)) if name.startswith("strided") else ()
    geometry = Geometry(CASES[name]["kernel"], *more)
    given = leaves(**CASES[name])
    output, ratio, *_ = _Layer.apply(*given, geometry, FLOOR, None)
    if given[2] is not None:
        # From places × columns to the form of outputs.
        members, batch, outputs, height, width = output.shape
        ratio = ratio[..., :outputs].view(members, batch, height, width, outputs).movedim(4, 2)
    reference = expected(given, geometry, ratio)
    torch.testing.assert_close(output, reference, rtol=1e-4, atol=1e-4)
    pull = torch.randn_like(output)
    trained = [part for part in given if part is not None]
    ours = torch.autograd.grad((output * pull).sum(), trained)
    theirs = torch.autograd.grad((reference * pull).sum(), trained)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=2e-3, atol=2e-3)


def test_noise_is_standard_normal_and_new_each_time():
    from bayeszip.variational.gpu_layers import Geometry, sampled

    x = torch.ones(100, 1, 1, 1, device=DEVICE)
    theta, log_sigma2 = torch.zeros(50, 1, 1, 1, device=DEVICE), torch.zeros(50, 1, 1, 1, device=DEVICE)
    draws = [sampled(x, theta, log_sigma2, None, None, Geometry(), FLOOR) for _ in range(2)]
    for draw in draws:
        assert abs(float(draw.mean())) < 0.06
        assert abs(float(draw.std()) - 1) < 0.05
        assert abs(float((draw**4).mean()) - 3) < 0.5
    assert abs(float((draws[0] * draws[1]).mean())) < 0.06


def test_many_networks_by_vmap():
    from bayeszip.variational.gpu_layers import Geometry, plain, sampled

    x, theta, log_sigma2, bias, _ = leaves(3, 4, 2, (6, 6), 5, (3, 3))
    geometry = Geometry((3, 3))
    noisy = vmap(lambda *parts: sampled(*parts, None, geometry, FLOOR), randomness="different")
    noisy(x, theta, log_sigma2, bias).square().sum().backward()
    assert all(part.grad.abs().sum() > 0 for part in (x, theta, log_sigma2, bias))
    for shared in (False, True):
        each = vmap(lambda i, w, b: plain(i, w, b, geometry), in_dims=(None if shared else 0, 0, 0))
        output = each(x[0] if shared else x, theta, bias)
        for member in range(3):
            alone = F.conv2d(x[0 if shared else member], theta[member], bias[member])
            torch.testing.assert_close(output[member], alone, rtol=1e-4, atol=1e-4)


@pytest.fixture
def calls(monkeypatch):
    """How often layers use the kernels, which they believe to be for this device."""
    from bayeszip.variational import gpu_layers, layers

    seen = []

    def counted(*arguments):
        seen.append(len(arguments))
        return sampled(*arguments)

    sampled = gpu_layers.sampled
    monkeypatch.setattr(gpu_layers, "sampled", counted)
    if INTERPRETED:
        monkeypatch.setattr(layers, "on_triton", lambda tensor, batched=False: True)
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


def test_layers_of_many_networks_use_it(calls):
    network = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.Flatten(), torch.nn.Linear(12, 5)).to(DEVICE)
    to_variational(network, log_sigma2=-40.0)
    network.train()
    rows = {name: torch.stack([p.detach(), p.detach() + 0.1]) for name, p in network.named_parameters()}
    inputs = torch.randn(2, 4, 1, 4, 4, device=DEVICE)

    def one(parameters, batch):
        return functional_call(network, parameters, (batch,))

    together = vmap(one, randomness="different")(rows, inputs)
    assert len(calls) == 2
    network.eval()
    for member in range(2):
        alone = one({name: part[member] for name, part in rows.items()}, inputs[member])
        torch.testing.assert_close(together[member], alone, rtol=1e-3, atol=2e-3)


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


def test_it_has_no_second_derivative():
    from bayeszip.variational.gpu_layers import Geometry, sampled

    given = leaves(1, 3, 2, (4, 4), 2, (3, 3))
    output = sampled(*given, Geometry((3, 3)), FLOOR)
    (slope,) = torch.autograd.grad(output.square().sum(), given[1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_adam_is_torchs():
    from bayeszip.variational.gpu_kernels import adam_step

    values = torch.randn(2, 1500, device=DEVICE)
    rows = [row.clone().requires_grad_() for row in values]
    rates, decay = torch.tensor([0.1, 0.2], device=DEVICE), torch.tensor([0.0, 0.3], device=DEVICE)
    optimizers = [
        torch.optim.Adam([row], lr=float(rate), weight_decay=float(weight))
        for row, rate, weight in zip(rows, rates, decay, strict=True)
    ]
    first, second = torch.zeros_like(values), torch.zeros_like(values)
    for step in range(1, 4):
        gradient = torch.randn_like(values)
        corrections = tuple(torch.tensor(part, device=DEVICE) for part in (1 - 0.9**step, (1 - 0.999**step) ** 0.5))
        adam_step(values, gradient, first, second, rates, decay, corrections, (0.9, 0.999), 1e-8)
        for row, optimizer, its in zip(rows, optimizers, gradient, strict=True):
            row.grad = its.clone()
            optimizer.step()
    torch.testing.assert_close(values, torch.stack([row.detach() for row in rows]), rtol=1e-4, atol=1e-5)
