"""What `requires_grad=False` means: compress leaves the layer alone, pack codes it like any other."""

import pytest
import torch
from torch import nn

import bayeszip
from bayeszip import codec
from bayeszip.errors import ModelError
from bayeszip.fitting import ResidentBatches, Watcher
from bayeszip.recipe import recipe
from bayeszip.tensors import QuantizedTensor, RawTensor

QUICK = recipe("quick").override("epochs_scale=0.02", "mixture.components=5")
INPUTS = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(64) % 3


class Silent(Watcher):
    """No display in tests; keeps what it is warned of."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def on_warning(self, message: str) -> None:
        self.warnings.append(message)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3))


def compress(net: nn.Module) -> bayeszip.Result:
    return bayeszip.compress(net, ResidentBatches(INPUTS, LABELS, 16), recipe=QUICK, device="cpu", watcher=Silent())


def test_a_frozen_layer_is_neither_trained_nor_quantized():
    net = network()
    net[0].requires_grad_(False)
    result = compress(net)
    assert result.fit.conversion.converted == ("2", "4")
    assert result.fit.conversion.kept == (("0", "Linear, frozen"),)
    stored = result.compressed.tensors["0.weight"]
    assert isinstance(stored, RawTensor)
    assert isinstance(result.compressed.tensors["2.weight"], QuantizedTensor)
    # Of its units those go that the next layer no longer reads; the others are as they were, bit for bit.
    rows = {row.numpy().tobytes() for row in net[0].weight.detach()}
    assert all(row.tobytes() in rows for row in stored.values)


def test_a_frozen_norm_keeps_its_statistics():
    net = nn.Sequential(nn.Linear(8, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))
    with torch.no_grad():
        net[1].running_mean.fill_(0.25)
        net[1].running_var.fill_(4.0)
    net[1].requires_grad_(False)
    settings = {"coding.norms": "keep", "coding.norm_error": 0}
    loaders = ResidentBatches(INPUTS, LABELS, 16)
    result = bayeszip.compress(net, loaders, recipe=QUICK, settings=settings, device="cpu", watcher=Silent())
    (norm,) = (tensor for name, tensor in result.compressed.tensors.items() if "running_mean" in name)
    assert (norm.values == 0.25).all()
    (norm,) = (tensor for name, tensor in result.compressed.tensors.items() if "running_var" in name)
    assert (norm.values == 4.0).all()


def test_a_network_that_is_frozen_altogether_is_trained():
    result = compress(network().requires_grad_(False))
    assert result.fit.conversion.converted == ("0", "2", "4")


def test_where_only_layers_of_other_kinds_are_left_there_is_nothing_to_compress():
    net = nn.Sequential(nn.Linear(8, 3), nn.PReLU())
    net[0].requires_grad_(False)
    with pytest.raises(ModelError, match=r"no layer that can be compressed; .*, unless they are frozen"):
        compress(net)


def test_pack_codes_what_is_frozen_like_anything_else():
    assert (
        bayeszip.pack(network().requires_grad_(False), example_inputs=INPUTS).blob
        == bayeszip.pack(network(), example_inputs=INPUTS).blob
    )


def test_a_bias_that_is_frozen_does_not_keep_its_layer_from_being_compressed():
    """As `fuse_conv_bn_eval` makes them: the weight can be trained, the bias it adds can't."""
    net = network()
    net[0].bias.requires_grad_(False)
    before = net[0].bias.detach().clone()
    result = compress(net)
    assert result.fit.conversion.kept == (("0.bias", "frozen"),)
    weight, bias = (result.compressed.tensors[f"0.{role}"] for role in ("weight", "bias"))
    assert isinstance(weight, bayeszip.QuantizedTensor)
    assert isinstance(bias, bayeszip.RawTensor)
    assert set(bias.values.tolist()) <= set(before.tolist())


def test_the_report_says_first_what_was_left_and_what_it_costs():
    net = network()
    net[0].requires_grad_(False)
    result = compress(net)
    lines = result.report().splitlines()
    line = next(index for index, text in enumerate(lines) if text.startswith("not pruned"))
    assert line < 4
    size = sum(t.bytes for t in codec.describe(result.blob).tensors if t.name.startswith("0."))
    assert lines[line].endswith(f"0 (Linear, frozen): left as it was, {size:,} B")


class Counted(nn.Module):
    """A network with a parameter of whole numbers, which can't have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.count = nn.Parameter(torch.tensor([3]), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows) * self.count


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization.together": True},
        {"quantization.rate": 4, "quantization.curvature": 1},
    ],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_parameter_of_whole_numbers_is_kept_by_whatever_looks_at_a_network(settings, frozen):
    net, watcher = Counted().requires_grad_(False), Silent()
    if not frozen:
        net.layers.requires_grad_(True)
    loader = ResidentBatches(INPUTS, LABELS, 16)
    result = bayeszip.compress(net, loader, recipe=QUICK, settings=settings, device="cpu", watcher=watcher)
    count = result.compressed.tensors["count"]
    assert isinstance(count, RawTensor)
    assert count.values.tolist() == [3]
    assert watcher.warnings == []


def test_a_parameter_of_whole_numbers_is_packed_and_previewed_too():
    packed = bayeszip.pack(Counted(), quality=95, calibration=INPUTS)
    assert packed.compressed.tensors["count"].values.tolist() == [3]
    only_closing = QUICK.override("all.epochs=0", "closing.epochs=1", "quantization.assignment=fit")
    assert bayeszip.preview(Counted(), ResidentBatches(INPUTS, LABELS, 16), recipe=only_closing).seconds > 0
