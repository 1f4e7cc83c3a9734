"""Random chains of layers: whatever is dead in them goes, and the outputs stay."""

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from bayeszip.graph import drop_dead_units, from_state, prove_same, trace
from bayeszip.tensors import CompressedModel, QuantizedTensor

VALUES = [0.0, -0.75, 0.5, 1.25]


@st.composite
def chains(draw: st.DrawFn) -> tuple[nn.Sequential, int]:
    """A few convolutions with pools and activations, flattened into a few linear layers; few weights are not zero."""
    channels, size = draw(st.integers(1, 3)), 8
    layers: list[nn.Module] = []
    inputs = channels
    for _ in range(draw(st.integers(0, 2))):
        after, kernel, padding = draw(st.integers(1, 5)), draw(st.sampled_from([1, 3])), draw(st.integers(0, 1))
        layers.append(nn.Conv2d(channels, after, kernel, padding=padding, bias=draw(st.booleans())))
        channels, size = after, size + 2 * padding - kernel + 1
        layers.extend(draw(st.sampled_from([[], [nn.ReLU()], [nn.Tanh()], [nn.ReLU(inplace=True)]])))
        if size >= 4:
            pools = (None, nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AvgPool2d(3, 1, 1), nn.MaxPool2d(3, 1, 1))
            pool: nn.MaxPool2d | nn.AvgPool2d | None = draw(st.sampled_from(pools))
            if pool is not None:
                layers.append(pool)
                size = size // 2 if pool.kernel_size == 2 else size
    layers.append(nn.Flatten())
    width = channels * size**2
    for _ in range(draw(st.integers(1, 3))):
        after = draw(st.integers(1, 6))
        layers += [nn.Linear(width, after, bias=draw(st.booleans())), draw(st.sampled_from([nn.ReLU(), nn.Sigmoid()]))]
        width = after
    return nn.Sequential(*layers), inputs


@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink])
@given(chains(), st.integers(0, 2**31), st.sampled_from([0.5, 0.85, 0.97]), st.sampled_from(["always", "smaller"]))
def test_a_shrunk_chain_computes_the_same(chain, seed, sparsity, fold):
    net, channels = chain
    generator = torch.Generator().manual_seed(seed)
    quantized = {}
    for name, parameter in net.named_parameters():
        symbols = torch.randint(1, 4, parameter.shape, generator=generator)
        symbols[torch.rand(parameter.shape, generator=generator) < sparsity] = 0
        quantized[name] = QuantizedTensor(symbols.numpy(), VALUES)
    images = torch.randn(2, channels, 8, 8, generator=generator)
    graph = trace(net, images)
    model = CompressedModel(from_state(net, quantized, graph), graph)
    shrunk = drop_dead_units(model, fold=fold)
    prove_same(model, shrunk, images)
    assert drop_dead_units(shrunk, fold=fold) == shrunk
    assert (
        shrunk.parameters <= model.parameters + sum(layer.bias is None for layer in net if hasattr(layer, "bias")) * 6
    )
