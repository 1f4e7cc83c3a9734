"""Local reparameterization against sampled weights, for every layer; the stock layer in eval()."""

import math

import pytest
import torch
from torch import nn

from bayeszip.variational import VariationalLayer, to_stock, to_variational, variational_weights
from bayeszip.variational.layers import Live
from bayeszip.variational.sampling import standard_normal_like

LAYERS = {
    "linear": (lambda: nn.Linear(6, 4), (3, 6)),
    "linear without bias": (lambda: nn.Linear(6, 4, bias=False), (2, 5, 6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2), (2, 4, 11)),
    "conv1d same": (lambda: nn.Conv1d(2, 3, 5, padding="same"), (2, 2, 7)),
    "conv2d": (lambda: nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 2)), (2, 2, 6, 5)),
    "conv2d same": (lambda: nn.Conv2d(2, 2, 3, padding="same", dilation=2), (1, 2, 5, 5)),
    "conv2d circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (1, 2, 4, 5)),
    "conv2d reflect": (lambda: nn.Conv2d(1, 2, 3, padding=2, padding_mode="reflect"), (1, 1, 4, 5)),
    "conv2d valid, depthwise": (lambda: nn.Conv2d(4, 4, 2, padding="valid", groups=4, bias=False), (1, 4, 4, 4)),
    "conv2d unbatched": (lambda: nn.Conv2d(2, 3, 3), (2, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2, stride=2, padding=1), (1, 2, 3, 4, 3)),
    "transpose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=3, padding=1, output_padding=2, groups=2), (2, 4, 4)),
    "transpose2d": (
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1, dilation=2),
        (1, 2, 3, 3),
    ),
    "transpose3d": (lambda: nn.ConvTranspose3d(2, 2, 2, stride=2), (1, 2, 2, 2, 2)),
}
SAMPLES = 2000


def variational(build, seed: int = 0) -> VariationalLayer:
    torch.manual_seed(seed)
    layer = build()
    to_variational(layer)
    with torch.no_grad():
        for weight in variational_weights(layer):
            weight.log_sigma2.uniform_(-4, -1)
    return layer


def sampled_weights(layer: nn.Module, stock: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Outputs of the stock layer for weights drawn from the posterior."""
    weights = list(variational_weights(layer))

    def draw() -> dict[str, torch.Tensor]:
        return {w.name: w.theta + (0.5 * w.log_sigma2).exp() * torch.randn_like(w.theta) for w in weights}

    return torch.stack([torch.func.functional_call(stock, draw(), (inputs,)) for _ in range(SAMPLES)])


@pytest.mark.parametrize("name", LAYERS)
def test_moments_are_those_of_sampled_weights(name):
    build, shape = LAYERS[name]
    layer, stock = variational(build), build()
    inputs = torch.randn(shape)
    with torch.no_grad():
        expected = sampled_weights(layer, stock, inputs)
        outputs = torch.stack([layer.train()(inputs) for _ in range(SAMPLES)])
    std = expected.std(0)
    error = std / math.sqrt(SAMPLES)
    assert ((outputs.mean(0) - expected.mean(0)).abs() < 7 * error).all()
    assert (outputs.std(0) / std - 1).abs().max() < 0.1


@pytest.mark.parametrize("name", LAYERS)
def test_eval_and_silence_are_the_stock_layer(name):
    build, shape = LAYERS[name]
    layer, stock = variational(build), build()
    stock.load_state_dict({w.name: w.theta.detach() for w in variational_weights(layer)})
    inputs = torch.randn(shape)
    assert torch.equal(layer.eval()(inputs), stock(inputs))
    layer.train()
    layer.noise = False
    assert torch.equal(layer(inputs), stock(inputs))
    layer.noise = True
    assert not torch.equal(layer(inputs), stock(inputs))


def test_transpose_takes_an_output_size():
    layer = variational(lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1))
    inputs = torch.randn(1, 2, 4, 4)
    assert layer.train()(inputs, output_size=[8, 8]).shape == (1, 3, 8, 8)
    stock = to_stock(variational(lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1)))
    assert torch.equal(layer.eval()(inputs, [8, 8]), stock(inputs, [8, 8]))


def test_channels_stay_last_in_compacted_layers():
    layer = variational(lambda: nn.Conv2d(6, 8, 3, padding=1, bias=False)).train()
    rows, columns = torch.tensor([0, 3, 4, 7]), torch.tensor([1, 2, 5])
    layer.live = Live(rows, columns, layer.weight.shape)
    for parameter in layer.parameters():
        parameter.data = parameter.data[rows][:, columns].contiguous(memory_format=torch.channels_last)
    inputs = torch.randn(2, 6, 5, 5)
    last = inputs.contiguous(memory_format=torch.channels_last).requires_grad_()
    output = layer(last)
    (slope,) = torch.autograd.grad(output.square().sum(), last)
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert slope.is_contiguous(memory_format=torch.channels_last)
    dead = [row for row in range(8) if row not in rows]
    assert not output[:, dead].any()
    layer.noise = False
    torch.testing.assert_close(layer(last), layer(inputs))


def test_embedding_rows_are_gaussian_and_padding_is_silent():
    layer = variational(lambda: nn.Embedding(5, 3, padding_idx=2))
    tokens = torch.tensor([[0, 2], [4, 0]])
    with torch.no_grad():
        outputs = layer.train()(tokens.expand(SAMPLES, 2, 2))
        deviations = (0.5 * layer.weight_log_sigma2).exp()
        mean_error = (outputs.mean(0) - layer.weight[tokens]).abs()
        assert (mean_error <= 6 * deviations[tokens] / math.sqrt(SAMPLES)).all()
        assert (outputs[:, 0, 1] == 0).all()
        spread = outputs.std(0)
        for place in ((0, 0), (1, 0), (1, 1)):
            torch.testing.assert_close(spread[place], deviations[tokens[place]], rtol=0.08, atol=0)
    assert torch.equal(layer.eval()(tokens), layer.weight[tokens])


def test_gradients_of_the_sampled_output():
    """With the noise held, the output is a function of θ, log σ² and x: against float64 finite differences."""
    layer = variational(lambda: nn.Linear(3, 2)).double().train()
    inputs = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def output(inputs: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        names = [name for name, _ in layer.named_parameters()]
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (inputs,))

    assert torch.autograd.gradcheck(output, (inputs, *layer.parameters()), eps=1e-5, atol=1e-3, rtol=1e-3)


def output_and_gradients(layer: VariationalLayer, inputs: torch.Tensor) -> list[torch.Tensor]:
    """With the same noise each time."""
    torch.manual_seed(1)
    inputs = inputs.detach().requires_grad_()
    output = layer(inputs)
    pull = torch.randn(output.shape, dtype=output.dtype)
    return [output, *torch.autograd.grad((output * pull).sum(), [inputs, *layer.parameters()])]


def by_autograd(layer: VariationalLayer, inputs: torch.Tensor, monkeypatch) -> list[torch.Tensor]:
    """The same with all that autograd keeps."""
    with monkeypatch.context() as patch:
        patch.setattr(type(layer), "_as_product", lambda self, *inputs: None)
        return output_and_gradients(layer, inputs)


@pytest.mark.parametrize("name", LAYERS)
def test_what_keeps_little_is_what_autograd_computes(name, monkeypatch):
    build, shape = LAYERS[name]
    layer = variational(build).double().train()
    inputs = torch.randn(shape, dtype=torch.float64)
    ours = output_and_gradients(layer, inputs)
    for our, their in zip(ours, by_autograd(layer, inputs, monkeypatch), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-10, atol=1e-12)
    keeps_little = "_SampleProduct" in ours[0].grad_fn.name()
    assert keeps_little == (not name.startswith("linear") and "unbatched" not in name)


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
def test_padding_that_is_longer_on_one_side_is_left_to_torch():
    layer = variational(lambda: nn.Conv2d(2, 2, (2, 3), padding="same")).train()
    output, *gradients = output_and_gradients(layer, torch.randn(2, 2, 5, 5))
    assert output.shape == (2, 2, 5, 5)
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


@pytest.mark.parametrize("shape", [(1, 1, 28, 28), (0, 1, 5, 5), (2, 1, 5, 6)])
def test_a_padding_set_later_counts(shape, monkeypatch):
    layer = variational(lambda: nn.Conv2d(1, 2, 3, bias=False)).train()
    layer.padding = (2, 1)
    ours = output_and_gradients(layer, torch.randn(shape))
    for our, their in zip(ours, by_autograd(layer, torch.randn(shape), monkeypatch), strict=True):
        assert our.shape == their.shape


def test_linear_layers_on_a_cpu_compute_in_the_order_that_files_were_made_with():
    layer = variational(lambda: nn.Linear(300, 100)).train()
    inputs = torch.randn(64, 300)
    ours = output_and_gradients(layer, inputs)
    torch.manual_seed(1)
    inputs.requires_grad_()
    mean = nn.functional.linear(inputs, layer.weight, layer.bias)
    variances = layer.weight_log_sigma2.exp(), layer.bias_log_sigma2.exp()
    deviation = (nn.functional.linear(inputs.square(), *variances) + 1e-8).sqrt()
    output = mean + deviation * standard_normal_like(deviation)
    theirs = torch.autograd.grad((output * torch.randn_like(output)).sum(), [inputs, *layer.parameters()])
    for our, their in zip(ours, [output, *theirs], strict=True):
        assert torch.equal(our, their)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layers_sample_too(backend):
    layer = variational(lambda: nn.Conv2d(2, 3, 3)).train()
    inputs = torch.randn(2, 2, 5, 5)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    compiled(inputs).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in layer.parameters())
    assert not torch.equal(compiled(inputs), compiled(inputs))


def test_many_networks_by_vmap():
    layer = variational(lambda: nn.Conv2d(1, 2, 3)).train()
    rows = {name: torch.stack([p.detach(), p.detach() + 1]) for name, p in layer.named_parameters()}
    inputs = torch.randn(4, 1, 5, 5)

    def one(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(layer, parameters, (inputs,))

    with torch.no_grad():
        draws = [torch.func.vmap(one, randomness="different")(rows) for _ in range(2)]
        layer.noise = False
        means = torch.func.vmap(one)(rows)
    assert not torch.equal(*draws)
    first, second = draws[0] - means
    assert abs(float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])) < 0.5


def test_gradient_is_finite_where_the_variance_is_zero():
    layer = variational(lambda: nn.Linear(3, 2, bias=False)).train()
    inputs = torch.zeros(4, 3, requires_grad=True)
    layer(inputs).sum().backward()
    assert torch.isfinite(inputs.grad).all()
    assert torch.isfinite(layer.weight_log_sigma2.grad).all()


def test_autocast_and_bfloat16_weights():
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    to_variational(network)
    inputs = torch.randn(2, 1, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        output = network.train()(inputs)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in network.parameters())
    low = nn.Linear(3, 2).bfloat16()
    to_variational(low)
    assert low.weight_log_sigma2.dtype == torch.float32
    output = low.train()(torch.randn(4, 3, dtype=torch.bfloat16))
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert torch.isfinite(low.weight_log_sigma2.grad).all()


def test_stock_state_dicts_load_and_keep_log_sigma2():
    layer = variational(lambda: nn.Linear(3, 2))
    stock = nn.Linear(3, 2).state_dict()
    before = layer.weight_log_sigma2.detach().clone()
    keys = list(stock)
    assert layer.load_state_dict(stock, strict=True)
    assert list(stock) == keys
    assert torch.equal(layer.weight, stock["weight"])
    assert torch.equal(layer.weight_log_sigma2, before)
    other = variational(lambda: nn.Linear(3, 2), seed=1)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight_log_sigma2, before)
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict(nn.Linear(4, 2).state_dict())
