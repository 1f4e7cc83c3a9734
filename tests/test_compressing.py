"""The whole path on small problems: what comes back is what was promised, and what can't work says why."""

import copy
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

import bayeszip
from bayeszip import codec, ending
from bayeszip.errors import CheckpointError, DataError, ModelError, OutputError, RecipeError, TargetError, TrainingError
from bayeszip.fitting import ResidentBatches, Watcher, evaluate
from bayeszip.quantize import quantize
from bayeszip.recipe import recipe

QUICK = recipe("quick").override("epochs_scale=0.05", "all.compact_every=2", "mixture.components=9")


class Silent(Watcher):
    """No display in tests."""


def blobs(n=512, features=12, classes=3, seed=0):
    """Gaussian clouds; only the first four features tell the classes apart."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    inputs = torch.randn(n, features, generator=generator)
    inputs[:, :4] += 3 * nn.functional.one_hot(labels, 4).float()
    return inputs, labels


def batches(n=512, seed=0, **options):
    return ResidentBatches(*blobs(n, seed=seed, **options), 64, shuffle=True, seed=seed)


def test_the_mixture_starts_from_the_pretrained_weights():
    class Start(Watcher):
        def on_phase(self, course):
            if course.phase.name == "vd":
                self.mixture = copy.deepcopy(next(t for t in course.problem.terms if t.name == "mixture"))

    start, network = Start(), mlp()
    settings = recipe("quick").override("epochs_scale=0.02", "mixture.components=9")
    bayeszip.compress(network, batches(), recipe=settings, device="cpu", watcher=start)
    pretrained = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    # Δμ = 2 std(w) / K, and log λ = −2 log(0.9 Δμ) (table 3).
    spacing = 2 * pretrained.std(correction=0).item() / 9
    expected = [k * spacing for k in (-4, -3, -2, -1, 1, 2, 3, 4)]
    assert start.mixture.means.tolist() == pytest.approx(expected, rel=1e-5)
    assert start.mixture.log_precisions.tolist() == pytest.approx([-2 * math.log(0.9 * spacing)] * 9, rel=1e-5)


def mlp(features=12, hidden=16, classes=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def compress(model, *, settings=QUICK, pretrain=True, data=None, watcher=None, **options):
    return bayeszip.compress(
        model,
        data or batches(),
        val_loader=None if data else batches(seed=1),
        recipe=settings,
        pretrain=pretrain,
        device="cpu",
        watcher=watcher or Silent(),
        **options,
    )


@pytest.fixture(scope="module")
def result():
    return compress(mlp(), settings=recipe("quick").override("epochs_scale=0.3", "all.tau1=0.2", "all.compact_every=5"))


def test_the_file_holds_the_network_and_gives_it_back(result, tmp_path):
    path = tmp_path / "net.bayz"
    result.save(path)
    assert path.read_bytes() == result.blob
    assert result.bytes == path.stat().st_size
    net = bayeszip.load(path)
    x, y = blobs(seed=2)
    assert torch.equal(net(x), result.model(x))
    assert not net.training
    assert all(type(layer).__module__.startswith(("torch.nn", "bayeszip.graph")) for layer in net.modules())
    assert evaluate(net, [(x, y)]) > 0.9


def test_the_ratio_counts_the_whole_file_against_the_original(result):
    parameters = sum(p.numel() for p in mlp().parameters())
    assert result.compressed.original_parameters == parameters
    assert result.ratio == pytest.approx(4 * parameters / len(result.blob))


def test_features_that_say_nothing_are_pruned(result):
    kept = result.compressed.tensors["0.weight"].symbols != 0
    assert kept[:, :4].sum() > 0
    assert kept[:, 4:].mean() < 0.5 * kept[:, :4].mean()


def test_all_weights_take_the_shared_values_and_zero(result):
    for tensor in result.compressed.tensors.values():
        assert isinstance(tensor, bayeszip.QuantizedTensor)
        assert len(tensor.codebook) <= QUICK.mixture.components + 8
        assert np.array_equal(tensor.codebook, tensor.codebook.astype(np.float16).astype(np.float32))


def test_the_report_says_what_went_in_and_out(result):
    report = result.report()
    assert f"{result.bytes:,} B" in report
    assert "0.weight" in report
    assert "validation accuracy" in report
    assert f"{100 * result.accuracy:.2f} % as decoded" in report


def test_history_has_every_epoch_with_bytes_at_the_end_of_phases(result):
    phases = [*result.fit.recipe.pretraining, *result.fit.recipe.phases, result.fit.recipe.closing]
    assert len(result.fit.history) == sum(phase.epochs for phase in phases)
    assert result.fit.history[-1].phase == "values"
    last_vd = [stats for stats in result.fit.history if stats.phase == "vd"][-1]
    assert last_vd.bytes is not None
    assert 0 < last_vd.zeros <= 1


def test_the_users_model_and_random_numbers_are_left_alone():
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    compress(model)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [type(layer) for layer in model] == [nn.Linear, nn.ReLU, nn.Linear]


def test_same_seed_same_bytes_other_seed_others():
    first, second, other = (compress(mlp(), seed=seed).blob for seed in (3, 3, 4))
    assert first == second
    assert first != other


@pytest.mark.parametrize("name", ["paper-vd+sws", "paper-vd", "paper-sws", "vd+sws", "l2"])
def test_every_recipe_runs(name):
    settings = recipe(name).override("epochs_scale=0.01", "l2.rate_theta=0.01")
    result = compress(mlp(), settings=settings)
    assert codec.decode(result.blob) == result.compressed
    assert result.accuracy > 0.5


def test_a_network_that_can_not_be_traced_is_stored_without_graph(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(12, 3)

        def forward(self, x):
            return self.fc(x) * (1.0 if x.sum().item() > -1e9 else 2.0)

    result = compress(Odd())
    assert result.without_graph
    assert "no graph in the file" in result.report()
    path = tmp_path / "odd.bayz"
    result.save(path)
    with pytest.raises(ModelError, match="into="):
        bayeszip.load(path)
    x, _ = blobs(seed=2)
    assert torch.equal(bayeszip.load(path, into=Odd())(x), result.model(x))


def test_layers_it_does_not_know_stay_and_are_named():
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.PReLU(), nn.Linear(8, 3))
    result = compress(model)
    assert result.fit.conversion.converted == ("0", "3")
    assert result.fit.conversion.kept == (("1", "BatchNorm1d"), ("2", "PReLU"))
    became = r"not pruned +1 \(BatchNorm1d\): trained, then rounded, \d+ B; 2 \(PReLU\): trained, \d+ B"
    assert re.search(became, result.report())


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda net: nn.init.zeros_(net[0].weight), id="all-zero layer"),
        pytest.param(lambda net: [nn.init.constant_(p, 0.1) for p in net.parameters()], id="constant weights"),
        pytest.param(lambda net: [nn.init.zeros_(p) for p in net.parameters()], id="all zero"),
    ],
)
@pytest.mark.parametrize("name", ["quick", "paper-vd+sws", "paper-vd", "paper-sws"])
def test_degenerate_weights_are_compressed(spoil, name):
    model = mlp()
    spoil(model)
    result = compress(model, settings=recipe(name).override("epochs_scale=0.01"), pretrain=False)
    assert codec.decode(result.blob) == result.compressed
    assert all(torch.isfinite(p).all() for p in result.model.parameters())


def test_layers_of_one_weight_are_compressed():
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 2))
    data = ResidentBatches(torch.randn(64, 1), torch.arange(64) % 2, 16)
    result = bayeszip.compress(model, data, recipe=QUICK, device="cpu", watcher=Silent())
    assert result.accuracy is None
    assert result.model(torch.zeros(3, 1)).shape == (3, 2)


def test_a_model_without_a_layer_to_compress_is_refused():
    with pytest.raises(ModelError, match="no layer that can be compressed; these can: Linear"):
        compress(nn.Sequential(nn.PReLU(), nn.Flatten()), pretrain=False)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused_by_name(value):
    model = mlp()
    with torch.no_grad():
        model[2].weight[1, 3] = value
    with pytest.raises(ModelError, match=r"2\.weight holds 1 values that are NaN or infinite"):
        compress(model, pretrain=False)


def test_nan_in_the_data_stops_with_phase_and_epoch():
    inputs, labels = blobs()
    inputs[100] = math.nan
    message = r"phase l2, epoch 1 of 1, step 2: the data \(inputs of 1 of 64 examples of the batch\) is not finite"
    with pytest.warns(RuntimeWarning, match=f"{message}; going back"), pytest.raises(TrainingError, match=message):
        compress(mlp(), data=ResidentBatches(inputs, labels, 64))


def test_an_empty_loader_is_refused():
    with pytest.raises(DataError, match="gave no batch"):
        bayeszip.compress(mlp(), [], recipe=QUICK, device="cpu", watcher=Silent())


def test_an_unwritable_path_says_so(result, tmp_path):
    with pytest.raises(OutputError, match="nowhere"):
        result.save(tmp_path / "nowhere" / "net.bayz")


def test_ctrl_c_while_saving_leaves_the_old_file(result, tmp_path, monkeypatch):
    path = tmp_path / "net.bayz"
    path.write_bytes(b"old")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        result.save(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_unknown_device_is_refused():
    with pytest.raises(ModelError, match="there is no device 'warp'"):
        bayeszip.compress(mlp(), batches(), recipe=QUICK, device="warp")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"can't read .*gone\.bayz"):
        bayeszip.load(tmp_path / "gone.bayz")


def test_a_convolutional_network_with_dead_channels_comes_back_smaller():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(6 * 9, 10), nn.ReLU(), nn.Linear(10, 2)
    )
    images = torch.randn(256, 1, 8, 8)
    labels = (images.mean(dim=(1, 2, 3)) > 0).long()
    settings = recipe("quick").override("epochs_scale=0.2", "all.tau1=0.3", "all.compact_every=2")
    result = bayeszip.compress(
        model,
        ResidentBatches(images, labels, 64, shuffle=True),
        recipe=settings,
        pretrain=True,
        device="cpu",
        watcher=Silent(),
    )
    assert result.compressed.parameters < result.compressed.original_parameters
    assert result.model(images[:2]).shape == (2, 2)


def test_the_default_recipe_is_ours():
    import inspect

    assert inspect.signature(bayeszip.compress).parameters["recipe"].default == "vd+sws"
    ours, papers = recipe("vd+sws"), recipe("paper-vd+sws")
    assert [phase.name for phase in ours.phases] == [phase.name for phase in papers.phases] == ["vd", "vd+sws"]
    assert (ours.quantization.codebook_bits, papers.quantization.codebook_bits) == (16, 32)
    assert ours.closing.epochs > papers.closing.epochs == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_networks_of_other_types_are_compressed_and_evaluated(dtype):
    inputs, targets = blobs()
    data = ResidentBatches(inputs.to(dtype), targets, 64)
    result = bayeszip.compress(
        mlp().to(dtype), data, val_loader=data, recipe=QUICK, pretrain=True, device="cpu", watcher=Silent()
    )
    assert result.accuracy is not None
    assert result.accuracy > 0.5


def test_a_module_at_two_places_keeps_its_graph():
    twice = nn.Linear(16, 16)
    network = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), twice, nn.ReLU(), twice, nn.ReLU(), nn.Linear(16, 3))
    assert compress(network).without_graph is None


def test_networks_without_values_are_refused():
    for network in (nn.Sequential(nn.LazyLinear(3)), mlp().to("meta")):
        with pytest.raises(ModelError, match="has no values yet"):
            compress(network)


@pytest.mark.parametrize("norms", ["keep", "fold"])
def test_the_progress_shows_the_size_of_the_whole_file(norms):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3))
    settings = QUICK.override("closing.epochs=0", f"coding.norms={norms}")
    result = bayeszip.compress(network, batches(), recipe=settings, device="cpu", watcher=Silent())
    last = [stats.bytes for stats in result.fit.history if stats.bytes][-1]
    # Norms, graph and names are most of it; only dead units, which go in the end, are counted still.
    assert result.bytes <= last < result.bytes + (700 if norms == "keep" else 150)
    weights = sum(
        tensor.bytes for tensor in codec.describe(result.blob).tensors if tensor.name in ("0.weight", "3.weight")
    )
    assert weights < (0.5 if norms == "keep" else 0.7) * last


def patches(n=512, seed=0):
    """Noise, and a bright square in the quarter of the image that is its class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 4
    inputs = torch.randn(n, 1, 8, 8, generator=generator)
    for quarter in range(4):
        row, column = 2 * (quarter // 2), 4 * (quarter % 2)
        inputs[labels == quarter, 0, row : row + 3, column : column + 3] += 1.5
    return inputs, labels


def normalized():
    """Convolutions whose scale is free, and different: a norm stands behind them."""
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False))
    network = nn.Sequential(*convolutions, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    with torch.no_grad():
        network[3].weight.mul_(8)
    return network


def test_the_snap_moves_weights_less_in_units_of_their_layers(monkeypatch):
    settings = recipe("quick").override(
        "l2.epochs=10", "vd.epochs=16", "vd+sws.epochs=10", "closing.epochs=0", "all.tau1=0.1",
        "all.rate_log_sigma2=0.01", "all.rate_theta=0.002", "mixture.components=9",
    )  # fmt: skip
    moved = {}

    def measured(posterior, how):
        tensors = quantize(posterior, how)
        thetas = {name: posterior.weights[name].theta for name in tensors if name.endswith("weight")}
        moved[units] = {
            name: np.linalg.norm(tensors[name].dequantize() - theta) / np.linalg.norm(theta)
            for name, theta in thetas.items()
        }
        return tensors

    monkeypatch.setattr(ending, "quantize", measured)
    for units in ("network", "layer"):
        data = ResidentBatches(*patches(), 64, shuffle=True, seed=0)
        result = compress(normalized(), settings=settings.override(f"mixture.units={units}"), data=data)
        assert evaluate(result.model, [patches(seed=2)]) > 0.9
    assert len(moved["layer"]) == 3
    for name, move in moved["layer"].items():
        assert move < 0.6 * moved["network"][name], name


def test_networks_without_norms_have_the_files_they_had():
    of_the_network = compress(mlp(), settings=QUICK.override("mixture.units=network"))
    assert compress(mlp()).blob == of_the_network.blob
    assert all(tensor.scale is None for tensor in of_the_network.compressed.tensors.values())


def test_a_rate_makes_the_file_smaller_and_is_stated():
    without = compress(mlp())
    result = compress(mlp(), settings=QUICK.override("quantization.rate=16"))
    assert result.bytes < without.bytes
    assert result.rate == 16
    assert re.search(r"weight of a bit +16\b", result.report())
    assert "weight of a bit" not in without.report()


def test_of_rates_on_trial_the_first_that_keeps_the_accuracy_is_taken():
    settings = QUICK.override("quantization.rate=1e3", "quantization.rate_trials=16", "quantization.rate_drop=2")
    without, result = compress(mlp()), compress(mlp(), settings=settings)
    assert result.rate in [1e3 * 0.75**trial for trial in range(1, 16)]
    assert result.bytes < without.bytes
    assert result.accuracy >= without.accuracy - 0.02
    more = compress(
        mlp(), settings=settings.override(f"quantization.rate={result.rate / 0.75}", "quantization.rate_trials=0")
    )
    assert more.accuracy < without.accuracy - 0.02


def test_a_curvature_is_seen_on_the_training_data():
    settings = QUICK.override("quantization.rate=16", "quantization.curvature=1")
    result, plain = compress(mlp(), settings=settings), compress(mlp(), settings=QUICK.override("quantization.rate=16"))
    assert result.bytes <= plain.bytes
    assert result.figures.loss < plain.figures.loss
    tried = compress(mlp(), settings=settings.override("quantization.rate_trials=1", "quantization.rate_drop=100"))
    assert (tried.compressed.nonzero, tried.rate) == (result.compressed.nonzero, 16)
    with pytest.raises(RecipeError, match="a target decides what is kept"):
        compress(mlp(), settings=settings, max_bytes=400)
    with pytest.raises(RecipeError, match="says what moves cost that save bits"):
        compress(mlp(), settings=QUICK.override("quantization.curvature=1"))


def test_a_network_that_refuses_to_be_looked_at_is_quantized_by_rate_alone():
    class Shy(nn.Sequential):
        def forward(self, rows):
            if torch.is_grad_enabled() and not self.training:
                raise RuntimeError("not while you look")
            return super().forward(rows)

    told, watcher, settings = list[str](), Silent(), QUICK.override("quantization.rate=16")
    watcher.on_warning = told.append
    result = compress(Shy(*mlp()), settings=settings.override("quantization.curvature=1"), watcher=watcher)
    assert result.blob == compress(Shy(*mlp()), settings=settings).blob
    assert any("not while you look" in message and "by itself" in message for message in told)


def test_weights_that_choose_together_lose_less_at_the_snap():
    few = QUICK.override("mixture.components=3", "closing.epochs=0")
    apart, joint = (compress(mlp(), settings=few.override(f"quantization.together={on}")) for on in ("false", "true"))
    assert joint.compressed.nonzero == apart.compressed.nonzero
    assert joint.snapped.loss < apart.snapped.loss
    # So does the file without a rate that trials of one are compared with.
    tried = few.override("quantization.rate=1000", "quantization.rate_trials=1", "quantization.together=true")
    assert compress(mlp(), settings=tried).blob == joint.blob
    # Where bits weigh something, they decide.
    priced = few.override("quantization.rate=4")
    assert (
        compress(mlp(), settings=priced).blob
        == compress(mlp(), settings=priced.override("quantization.together=true")).blob
    )


def test_trials_that_nothing_can_judge_are_refused():
    settings = QUICK.override("quantization.rate=1", "quantization.rate_trials=2")
    with pytest.raises(RecipeError, match="judged on validation data"):
        compress(mlp(), settings=settings, data=batches())
    with pytest.raises(RecipeError, match="a target decides"):
        compress(mlp(), settings=settings, max_bytes=400)


def test_transposed_and_grouped_convolutions_have_units_too(tmp_path):
    def network():
        torch.manual_seed(0)
        up = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 6, 2, 2), nn.BatchNorm2d(6))
        net = nn.Sequential(*up, nn.ReLU(), nn.Conv2d(6, 6, 3, 4, groups=3), nn.Flatten(), nn.Linear(54, 4))
        with torch.no_grad():
            net[3].weight.mul_(9)
        return net

    result = compress(network(), data=ResidentBatches(*patches(), 64, shuffle=True, seed=0))
    assert result.compressed.tensors["3.weight"].scale is not None
    result.save(tmp_path / "net.bayz")
    inputs = patches(seed=1)[0]
    outputs = bayeszip.load(tmp_path / "net.bayz")(inputs)
    torch.testing.assert_close(bayeszip.load(tmp_path / "net.bayz", into=network()).eval()(inputs), outputs)


def test_symbols_that_are_free_in_the_closing_phase_fit_better():
    def ended(reassign):
        settings = QUICK.override("closing.epochs=20", f"reassign={reassign}", "closing.rate_theta=0.01")
        return compress(mlp(), settings=settings, rates=(4,))

    fixed, free = ended("false"), ended("true")
    assert fixed.snapped == free.snapped
    for one, other in zip((fixed, *fixed.others), (free, *free.others), strict=True):
        assert other.figures.loss < one.figures.loss
        kept = [sum(tensor.nonzero for tensor in each.compressed.tensors.values()) for each in (one, other)]
        assert kept[1] <= kept[0]


class _Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(6, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


class _Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.layer(x).mean(1))


def _normed():
    return nn.Sequential(nn.Conv1d(5, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))


_ADAM = ("closing.rate_theta=0.01",)
_GRADIENT_DESCENT = ("closing.rate_theta=0.03", "closing.optimizer=sgd", "quantization.values=5")


@pytest.mark.parametrize("steps", [_ADAM, _GRADIENT_DESCENT])
@pytest.mark.parametrize(
    ("kind", "loss"), [(_Recurrent, "mse"), (_Attending, "cross-entropy"), (_normed, "cross-entropy")]
)
def test_symbols_are_free_in_networks_of_other_kinds(kind, loss, steps, tmp_path):
    torch.manual_seed(0)
    network, inputs = kind(), torch.randn(256, 5, 6)
    targets = inputs.mean((1, 2))[:, None] if loss == "mse" else (inputs[:, 0, 0] > 0).long()
    data = [(inputs[rows : rows + 32], targets[rows : rows + 32]) for rows in range(0, 256, 32)]
    settings = QUICK.override("closing.epochs=20", "reassign=true", *steps)
    result = bayeszip.compress(
        network,
        data,
        val_loader=data,
        recipe=settings,
        pretrain=True,
        device="cpu",
        watcher=Silent(),
        loss=loss,
        seed=0,
    )
    assert result.figures.loss < result.snapped.loss
    shared = [result.compressed.tensors.get(name) for name in result.fit.conversion.gaussian]
    codebooks = [tensor.codebook for tensor in shared if tensor is not None]
    assert codebooks
    assert not settings.quantization.values or max(map(len, codebooks)) <= 1 + settings.quantization.values
    result.save(tmp_path / "net.bayz")
    assert torch.equal(bayeszip.load(tmp_path / "net.bayz")(inputs), result.model(inputs))


def test_a_budget_is_kept_where_symbols_are_free():
    settings = QUICK.override("closing.epochs=20", "reassign=true", "closing.rate_theta=0.03")
    assert compress(mlp(), settings=settings, max_bytes=330).bytes <= 330


RATES = (4, 30.0, 1e3)


@pytest.fixture(scope="module")
def curve():
    watcher = Told()
    return compress(mlp(), rates=RATES, watcher=watcher), watcher


class Told(Silent):
    """Notes which phases there were."""

    def __init__(self):
        self.phases = []

    def on_epoch(self, stats, course):
        self.phases.append(stats.phase)


def test_one_training_is_ended_at_several_rates(curve):
    result, watcher = curve
    assert result.blob == compress(mlp()).blob
    assert [other.rate for other in result.others] == list(RATES)
    sizes = [each.bytes for each in (result, *result.others)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
    assert all(other.accuracy is not None and other.snapped.accuracy is not None for other in result.others)
    assert all(other.trained == result.trained for other in result.others)
    assert result.trained.loss != result.fit.before.loss
    names = ["values", "values-rate=4", "values-rate=30"]  # at the last rate nothing is left to train
    assert list(dict.fromkeys(watcher.phases))[-4:] == ["vd+sws", *names]
    for each, name in zip((result, *result.others), [*names, ""], strict=True):
        assert each.fit.recipe.quantization.rate == each.rate
        closing = [stats.phase for stats in each.fit.history if stats.phase.startswith("values")]
        assert closing == [name] * (QUICK.scaled().closing.epochs if name else 0)
    table = [line.split() for line in result.report().partition("warning:")[0].splitlines() if line][-4:]
    assert [row[:2] for row in table] == [[f"{each.rate:g}", f"{each.bytes:,}"] for each in (result, *result.others)]


def test_what_a_rate_costs_is_found_by_each_ending(curve):
    *_, last = curve[0].others
    assert last.died
    assert any("died" in warning for warning in last.warnings)
    assert not curve[0].died


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rates": (1, 2), "max_bytes": 400}, "a target decides how small the file is"),
        ({"rates": (1, 1)}, "rate 1 is there twice"),
        ({"rates": (1, 1.0000001)}, "rate 1 is there twice"),
        ({"rates": (1, 0)}, "rate 0 is there twice; the first file has the recipe's, 0"),
        ({"rates": (-1,)}, "quantization.rate must be"),
        ({"rates": ("much",)}, "quantization.rate must be"),
        ({"rates": "12"}, "rates are several numbers"),
        ({"rates": (2,), "settings": QUICK.override("quantization.rate=1", "quantization.rate_trials=2")}, "trials=0"),
        ({"rates": (2,), "settings": QUICK.override("coding.coder=csr-huffman")}, "bits are those of the coder"),
    ],
)
def test_rates_that_contradict_something_are_refused_before_the_training(options, message):
    with pytest.raises(RecipeError, match=message):
        compress(mlp(), **options)


class Moved(nn.Module):
    """Says with certainty that an example of class k is of class k + 1; has modes and gradients to lose."""

    def __init__(self):
        super().__init__()
        self.scale, self.dropout = nn.Parameter(torch.tensor(20.0)), nn.Dropout(0.9)

    def forward(self, inputs):
        return self.dropout(self.scale * inputs[:, :3].roll(1, dims=1))


def agreement(network, other):
    inputs, _ = blobs(seed=1)
    with torch.no_grad():
        return (network.eval()(inputs).argmax(1) == other.eval()(inputs).argmax(1)).float().mean().item()


def test_a_teacher_of_ones_own_is_imitated_and_told_of_and_left_alone():
    teacher, network = Moved().train(), mlp()
    settings = recipe("quick").override("epochs_scale=0.2", "all.tau1=0.1", "all.distillation=1")
    result = compress(network, settings=settings, teacher=teacher)
    assert teacher.training
    assert teacher.dropout.training
    assert teacher.scale.requires_grad
    assert agreement(result.network(), teacher) > 0.8
    assert result.fit.teacher == "Moved, 1 parameters"
    assert re.search(r"teacher +Moved, 1 parameters", result.report())
    alone = compress(network, settings=settings)
    assert agreement(alone.network(), teacher) < 0.2
    assert alone.fit.teacher is None


@pytest.mark.parametrize(
    ("teacher", "settings", "error", "message"),
    [
        (nn.Linear(12, 4), (), ModelError, r"answers \(2, 4\) where the network answers \(2, 3\)"),
        (nn.Linear(11, 3), (), TrainingError, "the teacher"),
        (nn.LSTM(12, 3), ("all.distillation=0",), RecipeError, "no phase of the recipe asks a teacher"),
        ("resnet-20-4", (), RecipeError, "must be a network"),
    ],
)
def test_a_teacher_that_can_not_be_imitated_is_refused(teacher, settings, error, message):
    with pytest.raises(error, match=message):
        compress(mlp(), settings=QUICK.override(*settings), teacher=teacher)


class Reversed(nn.Module):
    """Says with certainty that none of three is on that is, and all that are not."""

    def forward(self, inputs):
        return (-20 * inputs[:, :3]).sigmoid()


def switches():
    inputs, _ = blobs()
    return ResidentBatches(inputs, (inputs[:, :3] > 0).float(), 64)


def test_a_teacher_of_probabilities_is_imitated():
    network = nn.Sequential(mlp(), nn.Sigmoid())
    settings = recipe("quick").override("epochs_scale=0.2", "all.tau1=0.1", "all.distillation=1")
    options = {"settings": settings, "data": switches(), "loss": nn.BCELoss()}
    inputs, _ = blobs(seed=1)
    said = compress(network, teacher=Reversed(), **options).network()(inputs)
    assert ((said > 0.5) == (Reversed()(inputs) > 0.5)).float().mean() > 0.8


def off(outputs, targets):
    """A loss that holds the sum of a network's outputs against one number."""
    return (outputs.sum(1) - targets).square().mean()


def lost():
    """A network with a weight that is no number."""
    network = mlp()
    with torch.no_grad():
        network[0].weight[0, 0] = torch.nan
    return network


def below(outputs, targets):
    """A loss of numbers that is never above 0."""
    return (outputs - targets).square().mean() - 9


@pytest.mark.parametrize(
    ("loss", "targets", "teacher", "error", "message"),
    [
        (
            off,
            torch.randn(512),
            mlp(),
            RecipeError,
            r"under the loss off: .*targets \(64,\) of float32 .*leave the tea",
        ),
        (nn.BCELoss(), torch.rand(512, 3), mlp(), ModelError, "the teacher answers numbers outside of"),
        (below, torch.rand(512, 3), mlp(), RecipeError, "it is below 0, .*Add a constant .*, or name another loss"),
        ("mse", torch.rand(512, 3), lost(), ModelError, "the teacher answers NaN: check its weights"),
    ],
    ids=["off", "BCELoss", "below", "NaN"],
)
def test_a_teacher_that_the_loss_would_pass_over_is_refused(loss, targets, teacher, error, message):
    data, network = ResidentBatches(blobs()[0], targets, 64), nn.Sequential(mlp(), nn.Sigmoid())
    watcher = Silent()
    watcher.on_batch = None  # refused before any training
    with pytest.raises(error, match=message):
        compress(network, data=data, loss=loss, teacher=teacher, watcher=watcher)
    with pytest.raises(error, match=message):
        bayeszip.preview(network, data, recipe=QUICK, loss=loss, teacher=teacher, device="cpu")
    assert compress(network, settings=QUICK.override("epochs_scale=0.01"), data=data, loss=loss).bytes


def never(outputs, targets):
    """A loss that is no number."""
    return (outputs - targets).square().mean() * torch.nan


@pytest.mark.parametrize(
    ("network", "loss", "error", "message"),
    [
        (mlp(), nn.BCELoss(), ModelError, r"the network answers numbers outside of \[0, 1\].*end in a sigmoid"),
        (nn.Sequential(mlp(), nn.Sigmoid()), never, DataError, "the loss of the first batch is nan: check the data"),
    ],
)
def test_with_a_teacher_a_loss_that_the_network_does_not_suit_is_named(network, loss, error, message):
    with pytest.raises(error, match=message):
        compress(network, data=switches(), loss=loss, teacher=nn.Sequential(mlp(), nn.Sigmoid()))


def test_who_gives_example_inputs_gets_the_same_file():
    """The first batch, which is else looked at for its inputs, is not missed afterwards."""
    inputs, targets = blobs()
    files = []
    for given in (None, inputs[:2]):
        dataset = torch.utils.data.TensorDataset(inputs, targets)
        data = torch.utils.data.DataLoader(dataset, 64, shuffle=True, generator=torch.Generator().manual_seed(1))
        before = torch.get_rng_state()
        files.append(compress(mlp(), settings=QUICK.override("epochs_scale=0.02"), data=data, example_inputs=given))
        assert torch.equal(torch.get_rng_state(), before)
    assert files[0].blob == files[1].blob


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"exclude": ["nosuch"]}, ModelError, "no parameter or module is called 'nosuch'"),
        ({"exclude": ["*"]}, ModelError, "has no layer that can be compressed"),
        ({"settings": QUICK.override("coding.offset_bits=4")}, ModelError, "offset_bits"),
        ({"max_bytes": 10}, TargetError, "a file of 10 bytes is out of reach"),
    ],
)
def test_what_the_network_can_not_be_compressed_by_is_refused_before_its_pretraining(options, error, message):
    watcher = Silent()
    watcher.on_batch = None  # called in the first epoch
    with pytest.raises(error, match=message):
        compress(mlp(), watcher=watcher, **options)


def test_a_generator_is_refused_by_name():
    inputs, targets = blobs()
    with pytest.raises(DataError, match="train_loader is a generator, which gives its batches once; give a list"):
        bayeszip.compress(mlp(), ((inputs, targets) for _ in range(2)), recipe=QUICK)


def test_an_iterator_that_begins_anew_is_a_loader():
    class Anew:
        def __iter__(self):
            self.left = iter([blobs()])
            return self

        def __next__(self):
            return next(self.left)

    result = bayeszip.compress(mlp(), Anew(), recipe=QUICK.override("epochs_scale=0.01"), watcher=Silent())
    assert result.fit.history[-1].steps == 1


class Table(nn.Module):
    """A bag of words; `options` are the table's."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(20, 8, **options), nn.Linear(8, 3)

    def forward(self, words):
        return self.out(self.table(words).mean(1))


@pytest.mark.parametrize("options", [{"sparse": True}, {"max_norm": 1.0}])
def test_tables_that_torch_trains_in_ways_of_its_own_are_compressed(options):
    words = torch.randint(20, (256, 6), generator=torch.Generator().manual_seed(0))
    data = ResidentBatches(words, words[:, 0] % 3, 64)
    result = compress(Table(**options), settings=QUICK.override("epochs_scale=0.01"), data=data, pretrain=False)
    held = [name for name, _ in result.fit.conversion.kept]
    assert held == (["table"] if "max_norm" in options else [])
    assert result.network()(words[:4]).shape == (4, 3)


class Mirrored(nn.Module):
    """Decodes by the weights that it encodes with."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enc, self.bias = nn.Linear(12, 16), nn.Parameter(torch.zeros(12))
        with torch.no_grad():  # so that compaction would have something to leave out
            self.enc.weight[8:] *= 1e-4
            self.enc.bias[8:] = 0

    def forward(self, inputs):
        return nn.functional.linear(self.enc(inputs).relu(), self.enc.weight.t(), self.bias)


def test_a_layer_whose_weights_the_network_reads_too_is_not_cut():
    inputs, _ = blobs()
    data = ResidentBatches(inputs, inputs, 64, shuffle=True)
    settings = QUICK.override("all.compact_every=1", "all.rate_log_sigma2=0.1")
    result = compress(Mirrored(), settings=settings, data=data, loss="mse", pretrain=False)
    assert (result.compressed.tensors["enc.weight"].symbols != 0).any(axis=1).sum() <= 8
    assert result.network()(inputs).shape == (512, 12)


class Recurrent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer, self.head = nn.GRU(4, width, batch_first=True), nn.Linear(width, 3)

    def forward(self, steps):
        return self.head(self.layer(steps)[0][:, -1])


class Attending(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.head = nn.Linear(4, width), nn.Linear(width, 3)
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True)

    def forward(self, tokens):
        return self.head(self.layer(self.first(tokens)).mean(1))


class Normed(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Conv1d(3, width, 3), nn.BatchNorm1d(width), nn.Flatten(), nn.Linear(2 * width, 3))


@pytest.mark.parametrize(
    ("kind", "teacher", "loss"),
    [(Recurrent, Attending, "cross-entropy"), (Attending, Normed, "mse"), (Normed, Recurrent, "bce")],
)
def test_a_teacher_may_be_of_another_kind(kind, teacher, loss):
    inputs, labels = blobs(128)
    goals = labels if loss == "cross-entropy" else nn.functional.one_hot(labels, 3).float()
    data = ResidentBatches(inputs.view(128, 3, 4), goals, 32)
    settings = recipe("quick").override("epochs_scale=0.02", "mixture.components=9")
    result = compress(kind(8), settings=settings, data=data, teacher=teacher(16), loss=loss)
    assert result.fit.teacher.startswith(teacher.__name__)


def test_a_run_is_not_taken_up_with_another_teacher(tmp_path):
    settings = QUICK.override("epochs_scale=0.01")
    compress(mlp(), settings=settings, teacher=Moved(), checkpoints=tmp_path)
    with pytest.raises(CheckpointError, match="teacher"):
        compress(mlp(), settings=settings, teacher=mlp(), checkpoints=tmp_path, resume=True)
    with pytest.raises(CheckpointError, match="teacher"):
        compress(mlp(), settings=settings, checkpoints=tmp_path, resume=True)
    again = compress(mlp(), settings=settings, teacher=Moved(), checkpoints=tmp_path, resume=True)
    assert again.fit.teacher is not None


class Keeping(nn.Module):
    """Keeps what is in front of its last layer, for whoever looks at it."""

    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(classes=8), nn.Linear(8, 3)

    def forward(self, inputs):
        self.features = [self.body(inputs)]
        return self.head(self.features[0])


def test_a_network_that_keeps_its_features_is_compressed_and_teaches():
    settings = QUICK.override("quantization.together=true", "all.distillation=0.5")
    inputs, targets = blobs(64)
    teacher = Keeping()
    nn.functional.cross_entropy(teacher(inputs), targets).backward()
    # Without validation data the last call before the end is one with gradients.
    data = [(inputs, targets)]
    result = bayeszip.compress(Keeping(), data, recipe=settings, teacher=teacher, device="cpu", watcher=Silent())
    assert result.network()(inputs).shape == (64, 3)


def test_a_teacher_that_no_phase_goes_to_is_refused():
    changes = ("all.distillation=0", "closing.distillation=0.5", "closing.epochs=0")
    with pytest.raises(RecipeError, match="no phase of the recipe asks a teacher"):
        compress(mlp(), settings=QUICK.override(*changes), teacher=mlp())


def test_a_teacher_is_asked_in_the_pretraining_too():
    settings = recipe("quick").override("epochs_scale=0.6", "vd.epochs=1", "all.distillation=0", "vd+sws.epochs=0")
    settings = settings.override("closing.epochs=0", "vd.tau1=0", "vd.rate_theta=0", "l2.distillation=1")
    result = compress(mlp(), settings=settings, teacher=Moved())
    assert agreement(result.network(), Moved()) > 0.8
    data = batches()
    assert bayeszip.preview(mlp(), data, recipe=settings, pretrain=True, teacher=Moved(), device="cpu").seconds > 0
    with pytest.raises(RecipeError, match="l2: distillation needs a teacher"):
        compress(mlp(), settings=settings)
