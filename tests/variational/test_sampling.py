"""What keeps little for the way back computes what autograd would: values, gradients, types, layouts."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bayeszip.variational.sampling import (
    VARIANCE_FLOOR,
    Convolution,
    MatrixProduct,
    is_transformed,
    sample_around,
    sample_product,
    standard_normal_like,
)

PADDED = Convolution((1, 1), (1, 1), (1, 1), 1)
#: Product, shapes of input and weight, number of outputs.
PRODUCTS: dict[str, tuple[MatrixProduct | Convolution, tuple[int, ...], tuple[int, ...], int]] = {
    "vector": (MatrixProduct(), (3,), (4, 3), 4),
    "matrix": (MatrixProduct(), (5, 3), (4, 3), 4),
    "tokens": (MatrixProduct(), (2, 5, 3), (4, 3), 4),
    "convolution": (PADDED, (2, 2, 5, 4), (3, 2, 3, 3), 3),
    "strided, dilated, in groups": (Convolution((2,), (1,), (2,), 2), (2, 4, 9), (6, 2, 3), 6),
    "transposed": (Convolution((2, 2), (1, 1), (1, 1), 1, True, (1, 0)), (1, 2, 3, 3), (2, 3, 3, 3), 3),
    "transposed, in groups": (Convolution((2,), (0,), (1,), 2, True, (0,)), (2, 4, 3), (4, 2, 2), 4),
    "volume": (Convolution((1, 1, 1), (0, 1, 0), (1, 1, 1), 1), (1, 2, 3, 2, 3), (2, 2, 2, 2, 2), 2),
}


def leaves(name: str, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], MatrixProduct | Convolution]:
    """Input, θ, log σ², bias and its log σ²."""
    product, inputs, weight, outputs = PRODUCTS[name]
    torch.manual_seed(0)
    shapes = (inputs, weight, weight, (outputs,), (outputs,))
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes], product


def by_autograd(given: list[Tensor | None], product: MatrixProduct | Convolution) -> Tensor:
    x, theta, log_sigma2, bias, bias_log_sigma2 = given
    assert x is not None
    assert theta is not None
    assert log_sigma2 is not None
    of_bias = None if bias_log_sigma2 is None else bias_log_sigma2.exp()
    return sample_around(product.output(x, theta, bias), product.output(x.square(), log_sigma2.exp(), of_bias), None)


@pytest.mark.parametrize("name", PRODUCTS)
def test_gradients(name):
    given, product = leaves(name)

    def output(x: Tensor, theta: Tensor, log_sigma2: Tensor, bias: Tensor, bias_log_sigma2: Tensor) -> Tensor:
        torch.manual_seed(1)
        return sample_product(x, theta, log_sigma2, bias, bias_log_sigma2, product)

    assert torch.autograd.gradcheck(output, given)
    ours = output(*given)
    torch.manual_seed(1)
    theirs = by_autograd(given, product)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    pull = torch.randn_like(ours)
    pairs = zip(*(torch.autograd.grad(output, given, pull) for output in (ours, theirs)), strict=True)
    for our, their in pairs:
        torch.testing.assert_close(our, their, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("left_out", [(4,), (3, 4)])
@pytest.mark.parametrize("name", ["matrix", "convolution", "transposed"])
def test_gradients_without_biases(name, left_out):
    given, product = leaves(name)
    for place in left_out:
        given[place] = None
    outputs = []
    for sample in (sample_product, by_autograd):
        torch.manual_seed(1)
        outputs.append(sample(*given, product) if sample is sample_product else sample(given, product))
    trained = [part for part in given if part is not None]
    for our, their in zip(*(torch.autograd.grad(output.sum(), trained) for output in outputs), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("trained", range(5))
@pytest.mark.parametrize("name", ["matrix", "convolution"])
def test_only_what_is_trained_gets_a_gradient(name, trained):
    given, product = leaves(name)
    torch.manual_seed(1)
    expected = torch.autograd.grad(by_autograd(given, product).sum(), given[trained])[0]
    for place, part in enumerate(given):
        part.requires_grad_(place == trained)
    torch.manual_seed(1)
    sample_product(*given, product).sum().backward()
    torch.testing.assert_close(given[trained].grad, expected, rtol=1e-10, atol=1e-12)
    assert all((part.grad is None) == (place != trained) for place, part in enumerate(given))


def test_it_keeps_the_input_and_one_number_for_each_output():
    given, product = leaves("convolution", torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        output = sample_product(*given, product)
    own = {part.data_ptr() for part in given}
    others = [tensor for tensor in kept if tensor.data_ptr() not in own]
    assert [tensor.shape for tensor in others] == [output.shape]
    ratio = others[0]
    x, theta, log_sigma2, bias, bias_log_sigma2 = given
    deviation = (product.output(x.square(), log_sigma2.exp(), bias_log_sigma2.exp()) + VARIANCE_FLOOR).sqrt()
    noise = (output - product.output(x, theta, bias)) / deviation
    torch.testing.assert_close(ratio, noise / (2 * deviation), rtol=1e-3, atol=1e-3)


def test_it_can_be_gone_back_through_twice():
    given, product = leaves("convolution")
    output = sample_product(*given, product).sum()
    first = torch.autograd.grad(output, given, retain_graph=True)
    for once, again in zip(first, torch.autograd.grad(output, given), strict=True):
        assert torch.equal(once, again)


def test_it_has_no_second_derivative():
    given, product = leaves("convolution")
    (slope,) = torch.autograd.grad(sample_product(*given, product).square().sum(), given[1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_a_weight_changed_before_the_way_back_is_noticed():
    given, product = leaves("convolution")
    output = sample_product(*given, product)
    with torch.no_grad():
        given[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("name", ["matrix", "convolution", "transposed"])
def test_autocast(name):
    given, product = leaves(name, torch.float32)
    outputs, gradients = [], []
    for low in (True, False):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            outputs.append(sample_product(*given, product))
        gradients.append(torch.autograd.grad(outputs[-1].float().sum(), given))
    assert [output.dtype for output in outputs] == [torch.bfloat16, torch.float32]
    torch.testing.assert_close(outputs[0].float(), outputs[1], rtol=0.05, atol=0.1)
    for low, full in zip(*gradients, strict=True):
        assert low.dtype == torch.float32
        assert float((low - full).norm() / full.norm()) < 0.03


def test_under_autocast_it_keeps_numbers_of_that_type():
    given, product = leaves("convolution", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = sample_product(*given, product)
    x, *_, ratio = output.grad_fn.saved_tensors
    assert x.dtype == ratio.dtype == torch.bfloat16
    double, product = leaves("convolution")
    with torch.autocast("cpu", torch.bfloat16):
        assert sample_product(*double, product).dtype == torch.float64


def test_bfloat16_weights_keep_variances_in_float32():
    given, product = leaves("matrix", torch.float32)
    x, theta, log_sigma2, bias, bias_log_sigma2 = given
    low = [part.detach().bfloat16().requires_grad_() for part in (x, theta, bias)]
    sample_product(low[0], low[1], log_sigma2, low[2], bias_log_sigma2, product).sum().backward()
    assert log_sigma2.grad.dtype == torch.float32
    assert [part.grad.dtype for part in low] == [torch.bfloat16] * 3


@pytest.mark.parametrize("low", [False, True])
def test_channels_stay_last(low):
    product = Convolution((1, 1), (1, 1), (1, 1), 1)
    x = torch.randn(4, 8, 6, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    theta, log_sigma2 = (
        torch.randn(16, 8, 3, 3).contiguous(memory_format=torch.channels_last).requires_grad_() for _ in range(2)
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        output = sample_product(x, theta, log_sigma2, None, None, product)
    kept = [output.grad_fn.saved_tensors[0], output.grad_fn.saved_tensors[-1]]
    slopes = torch.autograd.grad(output.float().square().sum(), [x, theta, log_sigma2])
    for tensor in (output, *kept, *slopes):
        assert tensor.is_contiguous(memory_format=torch.channels_last)


def test_gradient_is_finite_where_the_variance_is_zero():
    given, product = leaves("convolution", torch.float32)
    x = torch.zeros_like(given[0], requires_grad=True)
    sample_product(x, given[1], given[2], None, None, product).sum().backward()
    assert all(torch.isfinite(part.grad).all() for part in (x, given[1], given[2]))


def test_transforms_are_seen():
    assert not is_transformed()
    seen = []
    torch.func.vmap(lambda x: seen.append(is_transformed()) or x)(torch.zeros(2))
    assert seen == [True]
    assert torch.compile(lambda x: x + is_transformed(), backend="eager")(torch.zeros(())) == 1


@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7), (256, 300)])
def test_noise_follows_torchs_seed(shape):
    like = torch.zeros(shape)
    torch.manual_seed(3)
    first, second = standard_normal_like(like), standard_normal_like(like)
    torch.manual_seed(3)
    assert torch.equal(standard_normal_like(like), first)
    assert first.shape == shape
    assert first.numel() == 0 or not torch.equal(first, second)
    assert standard_normal_like(like.double()).dtype == torch.float64
    torch.manual_seed(3)
    assert torch.equal(standard_normal_like(like.bfloat16(), dtype=torch.float32), first)


def test_a_product_is_what_torch_computes():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 4, 6, 6), torch.randn(6, 2, 3, 3), torch.randn(6)
    product = Convolution((2, 1), (1, 0), (1, 2), 2)
    assert torch.equal(product.output(x, weight, bias), F.conv2d(x, weight, bias, (2, 1), (1, 0), (1, 2), 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("name", ["matrix", "convolution", "transposed"])
def test_it_can_be_recorded(name, low):
    given, product = leaves(name, torch.float32)
    given = [part.detach().cuda().requires_grad_() for part in given]

    def step() -> tuple[Tensor, ...]:
        x, theta, log_sigma2, bias, bias_log_sigma2 = given
        with torch.autocast("cuda", torch.bfloat16, enabled=low, cache_enabled=False):
            output = sample_product(x, theta, log_sigma2, bias, bias_log_sigma2, product)
        return output, *torch.autograd.grad(output.float().sum(), given)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        recorded = step()
    draws = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        draws.append([part.clone() for part in recorded])
    output, _, by_theta, by_log_sigma2, *_ = zip(*draws, strict=True)
    assert not torch.equal(*output)
    assert not torch.equal(*by_log_sigma2)
    # That of θ does not depend on the noise.
    torch.testing.assert_close(*by_theta)


def test_noise_that_could_not_be_drawn_again_is_refused():
    """Checkpoints restore torch's own sources alone, so that others would go on on the way back."""
    generator = torch.Generator().manual_seed(0)

    def noisy(inputs):
        return inputs * standard_normal_like(inputs, generator)

    inputs = torch.ones(3, dtype=torch.float64, requires_grad=True)
    loss = checkpoint(noisy, inputs, use_reentrant=False).sum()
    with pytest.raises(RuntimeError, match=r"gradient checkpointing.*switch that off"):
        loss.backward()
