"""Damage is said: every warning, provoked by a network that deserves it, in report, record and log."""

import copy
import dataclasses
import json
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import bayeszip
from bayeszip import damage
from bayeszip.cli import app
from bayeszip.errors import DataError
from bayeszip.fitting import Phase, ResidentBatches, Watcher
from bayeszip.fitting.evaluation import Figures, Metric
from bayeszip.recipe import recipe
from bayeszip.record import run_record

SHORT = recipe("quick").override("epochs_scale=0.02", "mixture.components=9")


def clouds(seed=0, n=256):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 3
    inputs = torch.randn(n, 12, generator=generator)
    inputs[:, :4] += 3 * F.one_hot(labels, 4).float()
    return ResidentBatches(inputs, labels, 64, shuffle=True, seed=seed)


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    for _ in range(20):
        for inputs, labels in clouds():
            optimizer.zero_grad()
            F.cross_entropy(network(inputs), labels).backward()
            optimizer.step()
    return network


def compress(network, *settings, val=True, **options):
    return bayeszip.compress(
        network,
        clouds(),
        val_loader=clouds(1) if val else None,
        recipe=SHORT.override(*settings),
        device="cpu",
        watcher=Watcher(),
        **options,
    )


#: Takes every weight for noise.
RUIN = ("start_log_sigma2=10", "all.rate_log_sigma2=0.001", "all.rate_theta=0")


def said(result, part):
    return any(part in warning for warning in result.warnings)


def test_a_sound_network_is_compressed_without_a_word(trained):
    result = compress(trained, "epochs_scale=0.3", "all.tau1=0.05")
    assert result.warnings == ()
    assert "warning" not in result.report()


def test_weights_that_were_forgotten():
    network = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    nn.init.zeros_(network[2].weight)
    result = compress(network, "all.rate_theta=0")
    assert said(result, "at chance before it was compressed")
    assert said(result, "were its weights forgotten (--weights")


def test_a_network_that_was_destroyed_says_so_everywhere(trained, caplog):
    with caplog.at_level(logging.WARNING, logger="bayeszip"):
        result = compress(trained, *RUIN)
    assert result.accuracy < 0.5 < result.fit.before.accuracy
    assert said(result, "the compressed network is at chance")
    assert said(result, "no longer depend on its inputs")
    assert said(result, "0.weight, 2.weight died: not one weight is left in them")
    for warning in result.warnings:
        assert warning in caplog.text
        assert warning in run_record(result, {})["warnings"]
    last = result.report().strip().splitlines()[-1]
    assert last == f"warning: {result.warnings[-1]}"


def test_an_accuracy_that_fell(trained):
    # Two shared values are too few for it.
    result = compress(trained, "quantization.assignment=fit", "quantization.components=1", "closing.epochs=0")
    assert result.fit.before.accuracy - result.accuracy > 0.01
    assert said(result, "the validation accuracy fell by") or said(result, "at chance")


def test_a_loss_that_rose():
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    targets = inputs @ torch.randn(8, 2)
    network = nn.Linear(8, 2)
    with torch.no_grad():
        network.weight.copy_(torch.linalg.lstsq(inputs, targets).solution.T)
        network.bias.fill_(0.01)
    batches = ResidentBatches(inputs, targets + 0.1 * torch.randn(256, 2), 64)
    ruin = SHORT.override("all.distillation=0", "closing.epochs=0")
    result = bayeszip.compress(
        network, batches, val_loader=batches, recipe=ruin, device="cpu", watcher=Watcher(), loss="mse", max_bytes=40
    )
    assert result.accuracy is None
    assert result.figures.loss > 2 * result.fit.before.loss
    assert said(result, "the validation loss rose from")


@pytest.mark.parametrize("higher", [True, False])
def test_a_metric_that_got_worse(trained, higher):
    def share_of_first(outputs, labels):
        right = (outputs.argmax(1) == labels).float().mean()
        return right if higher else 1.01 - right

    share_of_first.higher_is_better = higher
    result = compress(trained, *RUIN, metric=share_of_first)
    assert result.fit.metric == Metric(share_of_first, higher, "share_of_first")
    assert said(result, "the validation share_of_first went from")
    assert "validation share_of_first" in result.report()


def test_a_training_that_is_too_short(trained):
    result = compress(trained, "all.rate_theta=1e-5", "all.rate_log_sigma2=1e-4")
    assert said(result, "the training was too short for the prior")
    assert not said(compress(trained, "all.rate_log_sigma2=1"), "too short")


class Unsized:
    """Gives batches, and does not say how many."""

    def __iter__(self):
        return iter(clouds())


def test_how_long_a_training_is_does_not_depend_on_a_loaders_length(trained):
    settings = SHORT.override("all.rate_theta=1e-5", "all.rate_log_sigma2=0.7")
    reaches = []
    for loader in (clouds(), Unsized()):
        result = bayeszip.compress(trained, loader, recipe=settings, device="cpu", watcher=Watcher())
        assert not said(result, "too short")
        reaches.append(result.fit.reach)
    assert reaches[0] == reaches[1]


def test_how_far_a_training_gets():
    phase = Phase(name="vd", epochs=1, tau1=1.0, rate_log_sigma2=0.01, rate_theta=0.001, schedule="linear")
    assert damage.reach_of([(phase, 500)], means=False) == pytest.approx(0.01 * 250 / damage.REACH)
    assert damage.reach_of([(phase, 500)]) == pytest.approx(0.001 * 250 / damage.REACH_OF_MEANS)
    assert damage.reach_of([(Phase(name="sws", noise=False, tau2=1.0), 500)]) is None


class Scaled(nn.Module):
    """A layer that is not known."""

    def __init__(self):
        super().__init__()
        self.factors = nn.Parameter(torch.randn(12))

    def forward(self, inputs):
        return inputs * self.factors


class Waves(Scaled):
    """One whose factors are frequencies, which can't be rounded."""

    def forward(self, inputs):
        return torch.sin(super().forward(inputs))


def test_factors_of_a_layer_that_is_not_known_are_rounded(trained):
    result = compress(nn.Sequential(Scaled(), *trained))
    assert not said(result, "left raw")
    assert "0 (Scaled): trained, then rounded" in result.report()


def test_a_layer_that_was_left_raw_with_its_bytes(trained):
    result = compress(nn.Sequential(Waves(), *trained))
    warning = next(warning for warning in result.warnings if "left raw" in warning)
    raw = next(tensor for tensor in result.description.tensors if "factors" in tensor.name)
    assert warning.startswith("0 could not be compressed and was left raw: ")
    assert f"{raw.bytes:,} B of the file's {result.bytes:,} B" in warning


class Tempered(nn.Module):
    """A network with a vector of its own beside its layers."""

    def __init__(self, layers):
        super().__init__()
        self.layers, self.heat = layers, nn.Parameter(torch.tensor([1.5, 1.0, 0.5]))

    def forward(self, inputs):
        return self.layers(inputs) * self.heat


def test_of_a_network_that_was_compressed_the_vector_that_was_not_is_named(trained):
    result = compress(Tempered(trained))
    warning = next(warning for warning in result.warnings if "left raw" in warning)
    raw = next(tensor for tensor in result.description.tensors if tensor.name == "heat")
    assert warning.startswith(f"heat could not be compressed and was left raw: {raw.bytes:,} B of the file's")


class Shifted(nn.Module):
    """A network with factors, a buffer and a constant of its own beside its layers."""

    def __init__(self, layers):
        super().__init__()
        self.layers, self.factors = layers, nn.Parameter(torch.linspace(0.9, 1.1, 12))
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, 12))

    def forward(self, inputs):
        return self.layers(inputs * self.factors + self.shift + torch.tensor([0.03] * 12))


def test_buffers_and_constants_are_no_layers_that_were_left_raw(trained):
    result = compress(Shifted(trained))
    assert {"shift"} < {tensor.name for tensor in result.description.tensors if tensor.kind != "quantized"}
    assert not said(result, "left raw")
    assert "the network itself (Shifted): trained, then rounded" in result.report()


def test_a_metric_that_is_no_number_is_told(trained):
    def broken(outputs, targets):
        return float("nan")

    assert said(compress(trained, metric=broken), "the validation broken is not a number, and was before")
    assert not said(compress(trained, metric=lambda outputs, targets: 0.5), "not a number")
    with pytest.raises(DataError, match="no validation metric to keep to: broken is not a number there"):
        compress(trained, metric=broken, max_metric_drop=0.1)


def test_a_point_is_no_more_than_a_point(trained):
    result = compress(trained)
    fit = dataclasses.replace(result.fit, before=Figures(accuracy=1.0))
    fallen = [dataclasses.replace(result, figures=Figures(accuracy=accuracy)) for accuracy in (0.99, 0.9899)]
    assert [damage.fell(each, fit) is None for each in fallen] == [True, False]


def test_of_a_layer_that_was_to_be_left_alone_nothing_is_said(trained):
    result = compress(trained, exclude=["0"])
    assert any(name.startswith("0") and why.endswith("excluded") for name, why in result.fit.conversion.kept)
    assert not [warning for warning in result.warnings if "left raw" in warning]


class TwoHeads(nn.Module):
    """Heads for two tasks, of which a call computes one, and a vector that nothing reads."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.ReLU())
        self.heads = nn.ModuleDict(
            {"first": nn.Linear(16, 3), "second": nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 2))}
        )
        self.spare = nn.Parameter(torch.ones(5))

    def forward(self, inputs, task="first"):
        return self.heads[task](self.body(inputs))


def test_parts_that_the_file_does_not_hold_are_named(tmp_path):
    result = compress(TwoHeads())
    assert not [name for name in result.compressed.tensors if name.startswith(("spare", "heads.second"))]
    assert said(
        result, "spare, heads.second are not in the file, since for the inputs that the network was traced with"
    )
    result.save(tmp_path / "net.bayz")
    own = TwoHeads()
    before = own.heads["second"][0].weight.clone()
    with pytest.warns(
        UserWarning, match=r"doesn't hold spare, heads\.second\.0\.weight, .* and 2 more.*TwoHeads keeps"
    ):
        bayeszip.load(tmp_path / "net.bayz", into=own)
    assert torch.equal(own.heads["second"][0].weight, before)


def test_a_part_that_the_file_does_not_hold_is_named_by_pack():
    inputs = torch.randn(4, 12)
    one = TwoHeads()
    del one.spare
    (warning,) = bayeszip.pack(one, example_inputs=inputs).warnings
    assert warning.startswith("heads.second is not in the file, since")
    assert "no output depends on it; if others need it, trace with those (example_inputs)" in warning
    assert bayeszip.pack(one).warnings == ()  # without a graph all is there


def test_weights_that_are_read_by_another_of_their_names_are_in_the_file(tmp_path):
    network = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    network[2].weight = network[0].weight
    inputs = torch.randn(4, 6)
    result = bayeszip.pack(network, example_inputs=inputs)
    assert result.warnings == ()
    result.save(tmp_path / "net.bayz")
    own = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    own[2].weight = own[0].weight
    bayeszip.load(tmp_path / "net.bayz", into=own)  # a warning would be an error here
    torch.testing.assert_close(own(inputs), result.network()(inputs))


def test_chance_is_the_most_frequent_class_within_its_noise():
    assert damage._is_chance(Figures(accuracy=0.92, chance=0.9, targets=100))
    assert not damage._is_chance(Figures(accuracy=0.92, chance=0.9, targets=10_000))
    assert not damage._is_chance(Figures(accuracy=1.0, chance=1.0, targets=100))
    assert not damage._is_chance(Figures(loss=1.0))


def test_without_validation_data_nothing_is_claimed(trained):
    result = compress(trained, *RUIN, val=False)
    assert not said(result, "chance")
    assert said(result, "died")


TOYS = """
import torch
from torch import nn

def net():
    network = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    nn.init.zeros_(network[2].weight)
    return network

def loaders():
    x, y = torch.randn(128, 12, generator=torch.Generator().manual_seed(0)), torch.arange(128) % 3
    batches = list(zip(x.split(32), y.split(32)))
    return batches, batches
"""


def test_the_command_line_ends_with_what_is_wrong(tmp_path, monkeypatch):
    (tmp_path / "toys.py").write_text(TOYS)
    monkeypatch.chdir(tmp_path)
    arguments = ["compress", "toys:net", "--data", "toys:loaders", "--recipe", "quick", "--set", "epochs_scale=0.02"]
    done = CliRunner().invoke(app, [*arguments, "-o", "net.bayz", "--run", "run", "--json", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout.strip().splitlines()[-1])
    kept = json.loads((tmp_path / "run" / "result.json").read_text())
    assert printed["warnings"] == kept["warnings"]
    assert any("at chance before" in warning for warning in kept["warnings"])
    assert kept["validation_loss_before"] > 0
    assert "warning: the network was at chance before" in (tmp_path / "run" / "report.txt").read_text()


def test_a_file_is_never_larger_than_what_pack_makes(trained):
    """A training that is only begun prunes nothing, and as many shared values as there are weights cost more."""
    packed = bayeszip.pack(trained, example_inputs=torch.zeros(2, 12))
    many = ("quantization.assignment=fit", "quantization.components=200", "closing.epochs=0", "all.tau1=0")
    result = compress(trained, *many)
    assert result.packed == result.bytes == packed.bytes
    assert result.accuracy is not None
    assert said(result, "so this is what `pack` makes")


def test_a_file_larger_than_what_pack_makes_says_so(trained):
    """What is frozen stays bit for bit, which `pack` does not heed."""
    network = copy.deepcopy(trained)
    network[0].requires_grad_(False)
    result = compress(network)
    assert result.bytes > result.packed
    assert said(result, f"`pack` makes a file of {result.packed} B of the network as it came, quantizing what is")
