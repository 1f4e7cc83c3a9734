"""Clustering and coding without training; verifying and exporting what is in a file."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import TensorDataset

import bayeszip
from bayeszip import codec, loading
from bayeszip.cli import main
from bayeszip.errors import DataError, FormatError, ModelError, OutputError, RecipeError
from bayeszip.graph import to_torch
from bayeszip.packing.contents import contents_of
from bayeszip.packing.steps import within_bounds
from bayeszip.quantize import bounded, cluster
from bayeszip.recipe import Coding


def network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    with torch.no_grad():
        net[0].weight[3] = 0
        net[1].weight[3] = 0
        net[1].bias[3] = -1
        net[1].running_var.uniform_(0.5, 2)
    return net.eval()


@pytest.fixture
def image():
    return torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def test_a_network_packs_shrinks_and_loads_without_its_class(image, tmp_path):
    result = bayeszip.pack(network(), example_inputs=(image,), components=64)
    assert result.without_graph is None
    result.save(tmp_path / "net.bayz")
    net = bayeszip.load(tmp_path / "net.bayz")
    with torch.no_grad():
        difference = (net(image) - network()(image)).abs().max()
        assert torch.equal(net(image), result.model(image))
    assert 0 < difference < 0.2
    assert result.compressed.tensors["0.weight"].shape[0] == 7
    assert result.bytes < 1700


def test_the_ratio_counts_parameters_not_statistics(image):
    parameters = sum(p.numel() for p in network().parameters())
    for inputs in (None, (image,)):
        result = bayeszip.pack(network(), example_inputs=inputs)
        assert result.compressed.original_parameters == parameters
        assert result.ratio == pytest.approx(4 * parameters / result.bytes)


def test_norm_statistics_and_biases_are_kept_bit_for_bit(image):
    result = bayeszip.pack(network(), components=4)
    original = network().state_dict()
    for name in ("1.running_mean", "1.running_var", "1.weight", "4.bias", "1.num_batches_tracked"):
        assert np.array_equal(result.compressed.tensors[name].values, original[name].numpy())
    assert "no example inputs" in result.without_graph


def test_more_components_move_weights_less():
    weights = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    errors = []
    for components in (2, 8, 32, 128):
        packed = bayeszip.pack({"w": weights}, components=components).compressed.tensors["w"]
        assert len(packed.codebook) <= components + 1
        errors.append(float(np.square(packed.dequantize() - weights.numpy()).mean()))
    assert errors == sorted(errors, reverse=True)
    # The best 128 values for a Gaussian leave √3π/2/128² = 1.7e-4 (Panter and Dite).
    assert errors[-1] < 2e-4


def test_a_state_dict_of_every_type_comes_back():
    state = {
        "double": torch.randn(3, 4, dtype=torch.float64),
        "half": torch.randn(8, 8).half(),
        "brain": torch.randn(5).bfloat16(),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "one": torch.ones(1, 1),
        "infinite": torch.tensor([[1.0, float("inf")]]),
    }
    result = bayeszip.pack(state, components=300)
    decoded = codec.decode(result.blob)
    assert list(decoded.tensors) == list(state)
    assert result.model is None
    with pytest.raises(ModelError, match="only tensors were packed"):
        result.network()
    assert decoded.tensors["count"].values == 7
    assert np.array_equal(decoded.tensors["half"].dequantize(), state["half"].float().numpy())
    assert np.isinf(decoded.tensors["infinite"].values[0, 1])


@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=12), elements=st.floats(-100, 100, width=32)))
def test_no_weight_moves_further_than_the_bound(weights):
    largest = np.abs(weights).max()
    if largest < 1e-30:
        return
    bound = 0.01 * float(largest)
    moved = np.abs(bounded(weights, bound).dequantize().astype(np.float64) - weights).max()
    assert moved <= bound


@given(
    hnp.arrays(np.float32, hnp.array_shapes(max_dims=2, max_side=12), elements=st.floats(-9, 9, width=16)),
    st.integers(1, 20),
)
def test_clustering_keeps_zeros_and_stays_within_the_range(weights, components):
    packed = cluster(weights, components)
    values = packed.dequantize()
    assert np.array_equal(values[weights == 0], weights[weights == 0])
    assert len(packed.codebook) <= components + 1
    if weights.size:
        assert values.min() >= min(0, weights.min()) - 1e-2
        assert values.max() <= max(0, weights.max()) + 1e-2
    if np.unique(weights[weights != 0]).size <= components:
        assert np.array_equal(values, weights)


def test_bounds_and_components_are_checked():
    weights = {"w": torch.randn(4, 4)}
    with pytest.raises(RecipeError, match="components must lie between"):
        bayeszip.pack(weights, components=0)
    with pytest.raises(RecipeError, match="max_error must be above 0 and below 1"):
        bayeszip.pack(weights, max_error=2.0)
    many = {"w": torch.linspace(-1, 1, 90_000).view(300, 300)}
    with pytest.raises(ModelError, match=r"w: a bound of .* needs .* shared values"):
        bayeszip.pack(many, max_error=1e-6)


def test_verify_accepts_our_files_and_refuses_damage(image, tmp_path):
    path = tmp_path / "net.bayz"
    bayeszip.pack(network(), example_inputs=(image,)).save(path)
    assert loading.verify(path) is None
    blob = bytearray(path.read_bytes())
    blob[len(blob) // 2] ^= 4
    path.write_bytes(blob)
    with pytest.raises(FormatError):
        loading.verify(path)


@pytest.mark.parametrize("coder", ["context", "csr-huffman"])
def test_verify_against_the_network_the_file_was_made_from(image, tmp_path, coder):
    path = tmp_path / "net.bayz"
    coding = Coding(coder=coder, keep_indices=True)
    quantized = bayeszip.pack(network(), components=300, coding=coding).model
    bayeszip.pack(quantized, example_inputs=(image,), components=300, coding=coding).save(path)
    assert loading.verify(path, against=quantized) < 1e-6
    with pytest.raises(
        ModelError, match=r"net\.bayz computes something else than Sequential: outputs differ by .*--dense"
    ):
        loading.verify(path, against=nn.Sequential(*list(network())[:-1], nn.Linear(8 * 36, 5)))
    with pytest.raises(ModelError, match=r"an output has shape \(4, 6\) in one network and \(4, 5\) in the other"):
        loading.verify(path, against=nn.Sequential(*list(network())[:-1], nn.Linear(8 * 36, 6)))


def test_dense_export_fits_the_original_class(image, tmp_path):
    bayeszip.pack(network(), example_inputs=(image,), coding=Coding(keep_indices=True)).save(tmp_path / "net.bayz")
    loading.export(tmp_path / "net.bayz", tmp_path / "dense.safetensors", dense=True)
    original = network()
    original.load_state_dict(load_file(tmp_path / "dense.safetensors"), strict=False)
    with torch.no_grad():
        small = bayeszip.load(tmp_path / "net.bayz")(image)
        assert torch.allclose(original.eval()(image), small, atol=1e-5)


def test_safetensors_export_is_what_load_gives(image, tmp_path):
    bayeszip.pack(network(), example_inputs=(image,)).save(tmp_path / "net.bayz")
    loading.export(tmp_path / "net.bayz", tmp_path / "net.safetensors")
    loaded = bayeszip.load(tmp_path / "net.bayz").state_dict()
    for name, tensor in load_file(tmp_path / "net.safetensors").items():
        assert torch.equal(tensor, loaded[name])


def test_an_unknown_ending_is_refused(image, tmp_path):
    bayeszip.pack(network()).save(tmp_path / "net.bayz")
    with pytest.raises(OutputError, match=r"to \.onnx or \.safetensors, not '\.pt'"):
        loading.export(tmp_path / "net.bayz", tmp_path / "net.pt")
    with pytest.raises(OutputError, match=r"dense tensors are exported to \.safetensors only"):
        loading.export(tmp_path / "net.bayz", tmp_path / "net.onnx", dense=True)


def test_load_takes_dtype_and_device(image, tmp_path):
    bayeszip.pack(network(), example_inputs=(image,)).save(tmp_path / "net.bayz")
    net = bayeszip.load(tmp_path / "net.bayz", dtype=torch.float64, map_location="cpu")
    assert net(image.double()).dtype == torch.float64


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["bayeszip", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    output, errors = capsys.readouterr()
    assert not left.value.code, errors
    return output


def test_the_commands(image, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_file(network().state_dict(), "w.safetensors")
    described = json.loads(
        run(monkeypatch, capsys, "pack", "w.safetensors", "-o", "w.bayz", "--components", 8, "--json")
    )
    assert described["bytes"] == (tmp_path / "w.bayz").stat().st_size
    assert "is sound" in run(monkeypatch, capsys, "verify", "w.bayz")
    assert "written to" in run(monkeypatch, capsys, "export", "w.bayz", "back.safetensors")
    assert load_file("back.safetensors").keys() == network().state_dict().keys()
    assert "the whole file" in run(monkeypatch, capsys, "pack", "w.safetensors", "-o", "w.bayz", "--max-error", 0.01)
    for coder in ("default", "context"):
        run(monkeypatch, capsys, "pack", "w.safetensors", "-o", f"{coder}.bayz", "--quality", 95, "--coder", coder)
    assert Path("default.bayz").read_bytes() == Path("context.bayz").read_bytes()


def test_the_report_says_how_far_weights_moved():
    torch.manual_seed(0)
    weights = {"w": torch.randn(60, 50), "b": torch.randn(60)}
    coarse, fine = (bayeszip.pack(weights, components=count) for count in (4, 256))
    decoded = torch.from_numpy(coarse.compressed.tensors["w"].dequantize())
    moved = float((decoded - weights["w"]).norm() / weights["w"].norm())
    assert coarse.moved == pytest.approx(moved, rel=1e-5)
    assert f"{100 * moved:.2g} % of their size" in coarse.report()
    assert fine.moved < 0.1 * coarse.moved
    assert bayeszip.pack({"w": torch.zeros(3, 4)}).moved == 0


def test_quality_is_kept_and_norms_move_with_the_weights(image, tmp_path):
    results = [bayeszip.pack(network(), example_inputs=(image,), quality=quality) for quality in (99, 95, 80)]
    for result, error in zip(results, (0.01, 0.05, 0.2), strict=True):
        assert 0.9 * error < result.moved <= error
    assert [result.bytes for result in results] == sorted((result.bytes for result in results), reverse=True)
    assert not any("running" in name for name in results[0].compressed.tensors)
    results[0].save(tmp_path / "net.bayz")
    assert loading.verify(tmp_path / "net.bayz") is None
    with torch.no_grad():
        before, after = network()(image), bayeszip.load(tmp_path / "net.bayz")(image)
    assert float((before - after).norm() / before.norm()) < 0.05


@pytest.mark.parametrize("budget", [500, 900, 10_000])
def test_a_budget_of_bytes_is_kept(image, budget):
    result = bayeszip.pack(network(), example_inputs=(image,), max_bytes=budget)
    assert result.bytes <= budget
    assert result.bytes > 0.9 * budget or result.moved < 2e-3


@pytest.mark.parametrize("calibrated", [False, True])
def test_no_budget_between_two_that_are_reached_is_refused(image, calibrated):
    torch.manual_seed(0)
    inputs = [torch.randn(32, *image.shape[1:])] if calibrated else None
    for budget in range(500, 1000, 50):
        result = bayeszip.pack(network(), example_inputs=(image,), max_bytes=budget, calibration=inputs)
        assert 0.85 * budget < result.bytes <= budget


def test_one_tensor_to_calibrate_on_is_a_batch(image):
    torch.manual_seed(0)
    inputs = torch.randn(200, *image.shape[1:])
    whole, split = (
        bayeszip.pack(network(), example_inputs=(image,), calibration=given) for given in (inputs, inputs.split(128))
    )
    assert whole.blob == split.blob


def test_a_data_set_to_calibrate_on_is_told_how_to_give_batches(image):
    with pytest.raises(DataError, match=r"calibration is a Dataset .* wrap it"):
        bayeszip.pack(network(), example_inputs=(image,), calibration=TensorDataset(torch.randn(4, 1, 8, 8)))


def test_a_budget_without_a_graph_counts_the_whole_file():
    state = network().state_dict()
    result = bayeszip.pack(state, max_bytes=900)
    assert 800 < result.bytes <= 900
    decoded = codec.decode(result.blob).tensors
    assert decoded["1.num_batches_tracked"].dtype == "int64"
    moved = np.abs(decoded["1.running_var"].dequantize() / state["1.running_var"].numpy() - 1)
    assert 0 < moved.max() < 0.1


def test_a_bound_holds_in_the_decoded_file(image):
    state = network().state_dict()
    decoded = codec.decode(bayeszip.pack(network(), max_error=0.02).blob).tensors
    for name in ("0.weight", "4.weight", "4.bias", "1.running_var"):
        original = state[name].double().numpy()
        assert np.abs(decoded[name].dequantize() - original).max() <= 0.02 * np.abs(original).max()


@pytest.mark.parametrize("knob", [{"max_error": 1e-5}, {"components": 2**15}])
@pytest.mark.parametrize("coder", ["context", "csr-huffman"])
def test_the_coder_changes_nothing_about_what_a_knob_keeps(image, knob, coder):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 5)).eval()
    with torch.no_grad():
        for values in (net[1].weight, net[1].running_var):
            values.uniform_(0.5, 2)
        for values in (net[1].bias, net[1].running_mean):
            values.normal_()
        whole = net(image)
        default, named = (
            bayeszip.pack(net, example_inputs=image, coding=coding, **knob).network()(image)
            for coding in (None, Coding(coder=coder))
        )
    assert torch.equal(named, default)
    assert float((named - whole).norm() / whole.norm()) < 5e-5


@pytest.mark.parametrize("knob", [{}, {"quality": 90}, {"max_bytes": 900}])
def test_the_default_coder_by_its_name_writes_the_same_file(image, knob):
    default, named = (
        bayeszip.pack(network(), example_inputs=image, coding=coding, **knob)
        for coding in (None, Coding(coder="context"))
    )
    assert named.blob == default.blob


def test_norms_rounded_beside_a_knob_that_keeps_them_are_refused(image):
    for name, knob in (("max_error", {"max_error": 0.01}), ("components", {"components": 8})):
        with pytest.raises(RecipeError, match=rf"coding\.norm_error=0\.01 moves what {name} keeps; .*norms=keep"):
            bayeszip.pack(network(), example_inputs=image, coding=Coding(norm_error=0.01), **knob)
        kept = bayeszip.pack(network(), example_inputs=image, coding=Coding(norm_error=0.01, norms="keep"), **knob)
        assert kept.blob == bayeszip.pack(network(), example_inputs=image, **knob).blob


def test_norms_may_be_folded_beside_a_knob_that_keeps_them_if_they_are_not_rounded(image):
    kept, folded = (
        bayeszip.pack(network(), example_inputs=image, coding=coding, components=8)
        for coding in (None, Coding(norm_error=0))
    )
    assert "1.running_var" in kept.compressed.tensors
    assert "1.running_var" not in folded.compressed.tensors
    torch.testing.assert_close(folded.network()(image), kept.network()(image), rtol=1e-4, atol=1e-5)


def test_two_knobs_are_refused():
    with pytest.raises(RecipeError, match="quality and max_bytes contradict"):
        bayeszip.pack(network(), quality=90, max_bytes=1000)


def test_a_curve_falls(image):
    points = bayeszip.packing.curve(network(), (98, 90, 70), example_inputs=(image,), accuracy=lambda net: 0.5)
    assert [point.quality for point in points] == [98, 90, 70]
    assert points[0].bytes > points[1].bytes > points[2].bytes
    assert points[0].moved < points[1].moved < points[2].moved
    assert {point.accuracy for point in points} == {0.5}


def test_the_sweep_is_shown_and_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_file(network().state_dict(), "w.safetensors")
    shown = run(monkeypatch, capsys, "pack", "w.safetensors", "--sweep", "--plot", "curve.svg")
    assert "weights moved by" in shown
    assert "accuracy" not in shown
    assert (tmp_path / "curve.svg").read_bytes().startswith(b"<?xml")
    points = json.loads(run(monkeypatch, capsys, "pack", "w.safetensors", "--sweep", "--json"))
    assert points[0]["quality"] == 99.5
    assert points[0]["bytes"] > points[-1]["bytes"]


@pytest.mark.parametrize(
    ("plot", "status", "message"),
    [
        ("curve.pdf", 2, "a plot is written to .svg or .png, not 'curve.pdf'"),
        ("gone/curve.svg", 1, "there is no folder"),
        ("curve.svg", 1, "plots need matplotlib"),
    ],
)
def test_a_plot_that_fails_is_refused_before_the_sweep(tmp_path, monkeypatch, capsys, plot, status, message):
    monkeypatch.chdir(tmp_path)
    save_file(network().state_dict(), "w.safetensors")
    monkeypatch.setattr("bayeszip.packing.curve", lambda *_, **__: pytest.fail("the sweep was begun"))
    if "matplotlib" in message:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["bayeszip", "pack", "w.safetensors", "--sweep", "--plot", plot])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == status
    assert message in capsys.readouterr().err


BY_NAME = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(6, 2)

    def forward(self, tokens, extra):
        return self.head(torch.cat([self.table(tokens).mean(1), extra], 1))

def loaders():
    parts = [{"extra": torch.randn(2, 2), "tokens": torch.randint(5, (2, 3)), "labels": torch.ones(2).long()}]
    return parts * 600, parts
"""


def test_a_sweep_over_inputs_by_name(tmp_path, monkeypatch, capsys):
    """In the order of the network's arguments, not of the data; as many examples are calibrated on as it says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "by_name.py").write_text(BY_NAME)
    given, curve = [], bayeszip.packing.curve

    def watched(model, **options):
        given.append(options.pop("calibration"))
        return curve(model, (98,), **options)

    monkeypatch.setattr(bayeszip.packing, "curve", watched)
    save_file(
        {"table.weight": torch.randn(5, 4), "head.weight": torch.randn(2, 6), "head.bias": torch.zeros(2)},
        "w.safetensors",
    )
    options = ("--into", "by_name:Net", "--calibrate", "by_name:loaders", "--data", "by_name:loaders", "--json")
    (point,) = json.loads(run(monkeypatch, capsys, "pack", "w.safetensors", "--sweep", *options))
    assert point["accuracy"] in (0, 0.5, 1)
    assert sum(len(batch.targets) for batch in given[0]) == 1024


def test_a_sweep_over_what_has_no_classes_says_what_to_leave_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_numbers.py").write_text(BY_NAME.replace("torch.ones(2).long()", "torch.ones(2, 2)"))
    save_file(
        {"table.weight": torch.randn(5, 4), "head.weight": torch.randn(2, 6), "head.bias": torch.zeros(2)},
        "w.safetensors",
    )
    options = [
        "--into",
        "of_numbers:Net",
        "--calibrate",
        "of_numbers:loaders",
        "--sweep",
        "--data",
        "of_numbers:loaders",
    ]
    monkeypatch.setattr(sys, "argv", ["bayeszip", "pack", "w.safetensors", *options])
    with pytest.raises(SystemExit):
        main()
    assert "the targets of of_numbers:loaders are no classes: leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quality", "95"], "name the file to write with -o"),
        (["--sweep", "--quality", "95"], "--sweep shows several qualities"),
        (["-o", "x.bayz", "--calibrate", "mnist"], "name it with --into"),
        (["-o", "x.bayz", "--quality", "95", "--components", "3"], "contradict each other"),
    ],
)
def test_misuse_of_the_command_is_told(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_file({"w": torch.randn(3, 4)}, "w.safetensors")
    monkeypatch.setattr(sys, "argv", ["bayeszip", "pack", "w.safetensors", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_what_is_no_parameter_of_a_layer_stays_bit_for_bit():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(20, 30)
            self.register_buffer("frequencies", torch.logspace(0, -4, 16))
            self.register_buffer("table", torch.randn(8, 9))

    net = Net()
    state = {name: tensor.numpy() for name, tensor in net.state_dict().items()}
    for result in (bayeszip.pack(net, quality=90), bayeszip.pack(net, max_error=0.1)):
        tensors = result.compressed.tensors
        assert np.array_equal(tensors["frequencies"].values, state["frequencies"])
        assert np.array_equal(tensors["table"].values, state["table"])
        assert not np.array_equal(tensors["fc.weight"].dequantize(), state["fc.weight"])


def test_a_network_of_dependent_values_is_loaded_and_shown_as_any_other(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 5)).eval()
    inputs = torch.randn(20, 64)
    packed = bayeszip.pack(net, example_inputs=inputs[:1], quality=90)
    described = codec.describe(packed.blob)
    assert described.options["ways"] == 0b11110
    assert packed.moved == pytest.approx(0.1, rel=0.02)
    packed.save(tmp_path / "net.bayz")
    loaded, into = bayeszip.load(tmp_path / "net.bayz"), bayeszip.load(tmp_path / "net.bayz", into=net)
    with torch.no_grad():
        assert torch.equal(loaded(inputs), packed.network()(inputs))
        assert torch.allclose(into(inputs), loaded(inputs), atol=1e-5)
    assert codec.encode(codec.decode(packed.blob)) == packed.blob


def test_a_matrix_with_nan_is_kept_and_named():
    net = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 4))
    assert bayeszip.pack(net).warnings == ()
    with torch.no_grad():
        net[0].weight[2, 3] = torch.nan
    result = bayeszip.pack(net)
    assert "since it holds NaN or infinity: 0.weight." in result.report()


class Positioned(nn.Module):
    """A table of positions that is no parameter, and larger than all that are."""

    positions: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.randn(16, 8, generator=torch.Generator().manual_seed(0)))
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out((x + self.positions).tanh())


@pytest.mark.parametrize("coding", [Coding(), Coding(keep_indices=True)])
def test_buffers_are_not_counted_among_parameters(coding):
    network = Positioned()
    with torch.no_grad():
        network.out.weight.fill_(0.5)[0] = 0
        network.out.bias.fill_(0.25)
    result = bayeszip.pack(network, example_inputs=torch.randn(2, 16, 8), coding=coding)
    assert "positions" in result.compressed.tensors
    assert "27 parameters, 19 not zero" in repr(result)
    assert re.search(r"parameters kept +27, of them 19 not zero", result.report())


SHORT_AND_LONG = [torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", SHORT_AND_LONG)
@pytest.mark.parametrize("with_graph", [True, False])
@pytest.mark.parametrize("knob", [{}, {"max_error": 0.02}])
def test_biases_of_every_type_are_rounded_and_come_back_in_it(dtype, with_graph, knob, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 32)).to(dtype).eval()
    x = torch.randn(4, 12, dtype=dtype)
    result = bayeszip.pack(net, example_inputs=(x,) if with_graph else None, **knob)
    assert {type(tensor).__name__ for tensor in result.compressed.tensors.values()} == {"QuantizedTensor"}
    result.save(tmp_path / "net.bayz")
    same = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 32)).to(dtype)
    loaded = bayeszip.load(tmp_path / "net.bayz", into=None if with_graph else same)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    # Units may have changed their places: outputs tell.
    difference = (loaded(x) - net(x)).abs().max() / net(x).abs().max()
    assert difference < 0.1


@pytest.mark.parametrize("dtype", SHORT_AND_LONG)
@pytest.mark.parametrize("share", [0.1, 1e-2, 1e-4])
def test_bounds_hold_in_the_type_that_a_vector_has(dtype, share):
    torch.manual_seed(0)
    state = {"a.weight": torch.randn(20, 20), "a.bias": torch.randn(20), "norm.weight": torch.rand(20) + 0.1}
    state = {name: tensor.to(dtype) for name, tensor in state.items()}
    contents = contents_of(state)
    assert set(contents.biases) | set(contents.vectors) == {"a.bias", "norm.weight"}
    found = within_bounds(dataclasses.replace(contents, matrices={}), share)
    for name, tensor in found.items():
        moved = (torch.from_numpy(tensor.dequantize()).to(dtype).double() - state[name].double()).abs()
        bound = state[name].double().abs()
        assert (moved <= share * (bound if name == "norm.weight" else bound.max())).all()


KEPT = {
    "too short for a grid": torch.randn(7).half(),
    "near the end of float16": torch.linspace(1, 65504, 16).half(),
    "float64 beyond float32": torch.linspace(1, 1e300, 16, dtype=torch.float64),
    "float64 below float32": torch.linspace(1e-300, 1, 16, dtype=torch.float64),
    "too close for float32": 1e9 + 1e-6 * torch.rand(16, dtype=torch.float64),
    "NaN": torch.full((16,), torch.nan).bfloat16(),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_vector_that_a_grid_would_harm_is_kept(name):
    state = {"a.weight": torch.randn(16, 4), "a.bias": KEPT[name]}
    packed = bayeszip.pack(state).compressed.tensors["a.bias"]
    assert torch.equal(to_torch(packed).nan_to_num(), KEPT[name].nan_to_num())
    assert to_torch(packed).dtype == KEPT[name].dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_network_of_16_bits_is_compared_as_it_rounds(dtype, tmp_path):
    def made():
        return nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).to(dtype).eval()

    bayeszip.pack(made(), example_inputs=torch.randn(4, 10).to(dtype)).save(tmp_path / "net.bayz")
    own = bayeszip.load(tmp_path / "net.bayz", into=made())
    assert bayeszip.verify(tmp_path / "net.bayz", against=own) < 0.01
    with pytest.raises(ModelError, match="computes something else"):
        bayeszip.verify(tmp_path / "net.bayz", against=made())


def test_inputs_that_the_network_does_not_take_are_refused():
    with pytest.raises(
        ModelError, match=r"Sequential can't be run on example_inputs of shapes \(2, 5\): .*2x5 and 10x3"
    ):
        bayeszip.pack(nn.Sequential(nn.Linear(10, 3)), example_inputs=torch.randn(2, 5))


def test_one_number_is_no_calibration():
    with pytest.raises(DataError, match="the input of a batch is one number"):
        bayeszip.pack(nn.Linear(5, 3), calibration=torch.tensor(1.0), quality=95)
