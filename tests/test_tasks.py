"""Tasks of all kinds at the doors: losses, metrics and batches by name, and options that contradict each other."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import bayeszip
from bayeszip.cli import app
from bayeszip.errors import DataError, RecipeError, TargetError, TrainingError
from bayeszip.fitting import Watcher
from bayeszip.fitting.evaluation import Figures, Judge, Metric
from bayeszip.fitting.likelihood import Likelihood
from bayeszip.loaders import TAKEN, named_loss, named_metric
from bayeszip.recipe import recipe

SHORT = recipe("quick").override("epochs_scale=0.02", "mixture.components=9")


def compress(network, batches, **options):
    return bayeszip.compress(network, batches, recipe=SHORT, device="cpu", watcher=Watcher(), **options)


def clouds(n=128, seed=0):
    labels = torch.arange(n) % 3
    inputs = torch.randn(n, 12, generator=torch.Generator().manual_seed(seed))
    inputs[:, :4] += 3 * F.one_hot(labels, 4).float()
    return inputs, labels


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))


class TwoByName(nn.Module):
    """Takes its inputs by name, and says what it predicts by name, as networks of transformers do."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, first, second, labels=None):
        hidden = torch.relu(self.left(first) + self.right(second))
        return {"logits": self.head(hidden), "hidden": hidden}


def by_name(n=128, seed=0):
    inputs, labels = clouds(n, seed)
    return [
        {"second": rows[:, 6:], "labels": told, "first": rows[:, :6]}
        for rows, told in zip(inputs.split(32), labels.split(32), strict=True)
    ]


def test_batches_and_outputs_by_name():
    torch.manual_seed(0)
    result = compress(TwoByName(), by_name(), val_loader=by_name(seed=1), pretrain=True)
    assert result.without_graph is None
    batch = by_name()[0]
    logits, hidden = result.model(batch["first"], batch["second"])
    assert logits.shape == (32, 3)
    assert (hidden >= 0).all()
    assert result.figures.accuracy > 0.4
    assert result.figures.loss > 0


def test_a_file_takes_one_input_whatever_its_name_and_several_by_their_places():
    x, y = clouds()
    one = bayeszip.pack(mlp(), example_inputs=x[:2]).network()
    assert bayeszip.evaluate(one, [{"cloud": x, "y": y}]) == bayeszip.evaluate(one, [(x, y)])
    examples = tuple(by_name()[0][name] for name in ("first", "second"))
    file = bayeszip.pack(TwoByName(), example_inputs=examples).network()
    with pytest.raises(DataError, match=r"second, first by name, which Network does not .* by their places .* --into"):
        bayeszip.evaluate(file, by_name())


def test_a_file_teaches_a_network_whose_inputs_have_names():
    """Although one of them is called as the file's own first input is."""

    class Pair(TwoByName):
        def forward(self, x, z):
            return super().forward(x, z)["logits"]

    examples = tuple(by_name()[0][name] for name in ("first", "second"))
    teacher = bayeszip.pack(Pair(), example_inputs=examples).network()
    batches = [{"x": each["first"], "z": each["second"], "labels": each["labels"]} for each in by_name()]
    assert compress(Pair(), batches, teacher=teacher).fit.teacher.startswith("Network, ")
    assert compress(Pair(), batches, teacher=teacher, example_inputs=examples).fit.teacher.startswith("Network, ")


def test_inputs_that_have_no_order_are_named():
    class Gap(TwoByName):
        def forward(self, first, mask=None, second=None):
            return super().forward(first, second)

    with pytest.raises(DataError, match=r"can't be put in the order of Gap.forward: mask comes before second"):
        compress(Gap(), by_name())
    with pytest.raises(DataError, match="it has no argument third"):
        compress(TwoByName(), [{"third": torch.ones(2, 6), "labels": torch.zeros(2, dtype=torch.int64)}])


def test_a_network_that_has_no_names_for_its_inputs_is_not_given_one():
    class Any(nn.Sequential):
        def forward(self, *inputs):
            return super().forward(*inputs)

    one = [(batch["first"], batch["labels"]) for batch in by_name()]
    named = [{"first": inputs, "labels": labels} for inputs, labels in one]
    with pytest.raises(DataError, match="give the inputs first, but the training data inputs by their places alone, "):
        compress(Any(nn.Linear(6, 3)), one, val_loader=named)


def test_validation_data_with_other_inputs_are_refused_before_the_training():
    """They would show another network than the one that the file holds."""

    class Masked(TwoByName):
        def forward(self, first, second, mask=None):
            return super().forward(first, second if mask is None else second * mask)

    masked = [{**batch, "mask": torch.zeros(32, 6)} for batch in by_name()]
    with pytest.raises(DataError, match=r"second, first, mask, but the training data first, second, and a file takes"):
        compress(Masked(), by_name(), val_loader=masked)
    with pytest.raises(DataError, match=r"second, first, but the training data first, second, mask, and a file takes"):
        compress(Masked(), masked, val_loader=by_name())
    both = compress(Masked(), masked, val_loader=masked)
    last = [stats.accuracy for stats in both.fit.history if stats.accuracy is not None][-1]
    assert both.figures.accuracy == pytest.approx(last, abs=0.05)
    first, second, mask = (masked[0][name] for name in ("first", "second", "mask"))
    other = torch.randn(32, 6)
    assert torch.equal(both.network()(first, second, mask)[0], both.network()(first, other, mask)[0])


def test_a_batch_is_taken_for_example_inputs():
    batches = list(zip(*(part.split(32) for part in clouds()), strict=True))
    assert compress(mlp(), batches, example_inputs=batches[0]).without_graph is None
    named = compress(TwoByName(), by_name(), val_loader=by_name(seed=1), example_inputs=by_name()[0])
    assert named.without_graph is None
    assert named.figures.loss > 0


def test_all_figures_are_measured_together():
    inputs, labels = clouds()
    network = mlp()

    def first_right(outputs, targets):
        return (outputs.argmax(1) == targets).double().mean()

    found = Judge(Likelihood.of("cross-entropy"), Metric.of(first_right))(
        network, [(inputs[:100], labels[:100]), (inputs[100:], labels[100:])]
    )
    outputs = network(inputs)
    right = (outputs.argmax(1) == labels).double().mean().item()
    assert found.accuracy == pytest.approx(right)
    assert found.metric == pytest.approx(right)
    assert found.loss == pytest.approx(F.cross_entropy(outputs, labels).item(), rel=1e-5)
    assert found.chance == pytest.approx(43 / 128)
    assert Figures.in_line(found.line()) == found
    assert Figures.in_line(Figures(loss=2.0).line()) == Figures(loss=2.0)


class Same(nn.Module):
    """Gives what it is given."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, inputs):
        return self.factor * inputs


def test_switches_have_an_accuracy_and_ignored_targets_none():
    logits = torch.tensor([[2.0, -1.0], [-3.0, 4.0]])
    wanted = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    assert Judge(Likelihood.of("bce"))(Same(), [(logits, wanted)]).accuracy == 0.75
    assert Judge(Likelihood.of("cross-entropy"))(Same(), [(logits, torch.tensor([0, -100]))]).accuracy == 1.0


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        (nn.CrossEntropyLoss(ignore_index=255), 255),
        (lambda outputs, targets: F.cross_entropy(outputs, targets, ignore_index=255), 255),
        (nn.CrossEntropyLoss(ignore_index=2), 2),
    ],
)
def test_targets_that_are_not_to_be_learnt_are_not_counted(loss, ignored):
    logits = torch.tensor([[3.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 3.0, 0.0], [3.0, 0.0, 0.0]])
    found = Judge(Likelihood.of(loss))(Same(), [(logits, torch.tensor([0, 1, ignored, ignored]))])
    assert (found.accuracy, found.chance, found.targets) == (1.0, 0.5, 2)


@pytest.mark.parametrize("part", ["inputs", "targets"])
def test_validation_data_that_hold_nan_are_refused(part):
    x, _ = clouds()
    holding = x.clone()
    holding[-1] = torch.nan
    pair = (holding, x[:, :2]) if part == "inputs" else (x, holding[:, :2])
    with pytest.raises(DataError, match=f"{part} of the validation or test data hold NaN"):
        compress(nn.Linear(x.shape[1], 2), [(x, x[:, :2])], val_loader=[(x, x[:, :2]), pair], loss="mse")


def test_a_metric_that_collects():
    class Collecting:
        higher_is_better = False
        seen = 0

        def __call__(self, outputs, targets):
            raise AssertionError("update is called instead")

        def update(self, outputs, targets):
            self.seen += len(targets)

        def compute(self):
            return torch.tensor(float(self.seen))

        def reset(self):
            self.seen = 0

    metric = Metric.of(Collecting())
    assert not metric.higher_is_better
    judge = Judge(None, metric)
    assert [judge(mlp(), [clouds()]).metric for _ in range(2)] == [128.0, 128.0]


def test_a_metric_that_fails_is_named():
    def fails(outputs, targets):
        raise KeyError("no such thing")

    batches = [(torch.randn(8, 3), torch.randint(2, (8,)))]
    with pytest.raises(TrainingError, match="the metric fails on a batch"):
        Judge(Likelihood.of("cross-entropy"), Metric.of(fails))(nn.Linear(3, 2), batches)


def test_a_metric_is_kept():
    def right(outputs, targets):
        return (outputs.argmax(1) == targets).float().mean()

    batches = [clouds()]
    result = compress(mlp(), batches, val_loader=batches, pretrain=True, metric=right, max_metric_drop=0.02)
    assert result.figures.metric >= result.fit.before.metric - 0.02 - 1e-6
    assert result.fit.target == "metric at most 0.02 worse"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_metric_drop": 1.0, "val_loader": [clouds()]}, RecipeError, "max_metric_drop is about a metric"),
        ({"max_loss_increase": 0.1}, DataError, "max_loss_increase is measured on validation data"),
        ({"metric": len}, RecipeError, "metric= is measured on validation data"),
        ({"metric": 3}, RecipeError, "metric must be a function of outputs and targets, not int"),
        ({"loss": "hinge"}, RecipeError, "no loss 'hinge'"),
        ({"max_loss_increase": -0.1}, RecipeError, "max_loss_increase must be at least 0"),
        ({"val_loader": TensorDataset(*clouds())}, DataError, "val_loader is a Dataset"),
        ({"val_loader": 3}, DataError, "val_loader must give batches when it is iterated; a int does not"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other(options, error, message):
    with pytest.raises(error, match=message):
        compress(mlp(), [clouds()], **options)


@pytest.mark.parametrize("loss", [F.cross_entropy, "cross-entropy", nn.CrossEntropyLoss()])
@pytest.mark.parametrize("call", [compress, lambda *given, **more: bayeszip.preview(*given, recipe=SHORT, **more)])
def test_a_cross_entropy_over_one_class_is_refused(loss, call):
    """It is always 0, so training would prune all that the network knows."""
    inputs, labels = clouds()
    network = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))
    with pytest.raises(RecipeError, match=r"one output for each example.*loss= \(--loss\)"):
        call(network, [(inputs, labels[:, None].float())], loss=loss)


def test_pretraining_that_there_is_not():
    bare = recipe("quick").override("l2.epochs=0")
    with pytest.raises(RecipeError, match="quick has no pretraining"):
        bayeszip.compress(mlp(), [clouds()], recipe=bare, pretrain=True, watcher=Watcher())


def test_a_data_set_in_place_of_a_loader_is_named():
    with pytest.raises(
        DataError, match=r"train_loader is a Dataset \(TensorDataset\), .*wrap it: torch.utils.data.Dat"
    ):
        compress(mlp(), TensorDataset(*clouds()))
    assert compress(mlp(), DataLoader(TensorDataset(*clouds()), 32)).bytes


def test_the_size_that_is_shown_is_that_of_the_file():
    # An LSTM has no variational form here; its weights stay in the file as they are.
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.tell = nn.LSTM(4, 16, batch_first=True), nn.Linear(16, 3)

        def forward(self, inputs):
            return self.tell(self.read(inputs)[0][:, -1])

    inputs, labels = clouds()
    result = compress(Reader(), [(inputs.view(128, 3, 4), labels)])
    shown = [stats.bytes for stats in result.fit.history if stats.bytes]
    assert 0.8 * result.bytes < shown[-1] < 1.25 * result.bytes


# On the command line

TOYS = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

def loaders():
    x = torch.tanh(torch.randn(128, 8, generator=torch.Generator().manual_seed(0)))
    batches = [(part, part) for part in x.split(32)]
    return batches, batches

def far(outputs, targets):
    return (outputs - targets).abs().max()

def loss(outputs, targets):
    return (outputs - targets).square().mean()

def accuracy(outputs, targets):
    return 100 * ((outputs - targets).abs() < 0.1).float().mean()
"""


@pytest.fixture
def toys(tmp_path, monkeypatch):
    (tmp_path / "toys.py").write_text(TOYS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


COMPRESS = ("compress", "toys:net", "--data", "toys:loaders", "--recipe", "quick", "--set", "epochs_scale=0.02",
            "--pretrain", "--device", "cpu", "-o", "net.bayz")  # fmt: skip


@pytest.mark.parametrize("loss", ["mse", "toys:loss"])
def test_losses_and_metrics_on_the_command_line(toys, loss):
    done = run(*COMPRESS, "--loss", loss, "--metric", "toys:far,lower", "--json")
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    assert figures["accuracy"] is None
    assert 0 < figures["loss"] < 1
    assert figures["far"] > 0
    again = run("evaluate", "net.bayz", "--data", "toys:loaders", "--loss", loss, "--metric", "toys:far", "--json")
    assert json.loads(again.stdout)["loss"] == pytest.approx(figures["loss"], rel=1e-4)
    words = run("evaluate", "net.bayz", "--data", "toys:loaders", "--loss", loss, "--metric", "toys:far")
    assert words.stdout.startswith(f"validation loss {figures['loss']:.4g}, far ")
    alone = json.loads(run("evaluate", "net.bayz", "--data", "toys:loaders", "--metric", "toys:far", "--json").stdout)
    assert "loss" not in alone, "nobody asked for one"
    assert alone["far"] == pytest.approx(json.loads(again.stdout)["far"])
    assert run("evaluate", "net.bayz", "--data", "toys:loaders", "--metric", "toys:far").stdout.startswith(
        "validation far "
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--loss", "hinge"), "there is no loss 'hinge'"),
        (("--metric", "nothing"), "there is no metric 'nothing'"),
        (("--metric", "toys:accuracy"), "calls something else, 'accuracy'; rename the function"),
        (("--metric", "toys:loss"), "calls something else, 'loss'; rename the function"),
        (("--metric", "toys:far,sideways"), "better when it is lower or higher, not 'sideways'"),
        (("--max-metric-drop", "1"), "--max-metric-drop is about a metric; name it with --metric"),
        (("--set", "tau1=2"), "write all.tau1=2"),
    ],
)
def test_what_is_misused_is_said(toys, arguments, message):
    done = run(*COMPRESS, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


def test_no_metric_has_the_name_of_what_else_is_in_a_record(toys):
    done = run(*COMPRESS, "--loss", "mse", "--metric", "toys:far,lower", "--rates", "2", "--run", "run", "--json")
    assert done.exit_code == 0, done.output
    record, told = json.loads((toys / "run" / "result.json").read_text()), json.loads(done.stdout.splitlines()[-1])
    assert {*record, *told, *told["others"][0], "target", "strength", "hold_out", "teacher"} - {"far"} == TAKEN


def test_losses_and_metrics_by_name():
    assert named_loss("bce").kind == "switches"
    assert not named_metric("mse").higher_is_better
    assert named_metric("mse,higher").higher_is_better
    assert named_metric("torch.nn.functional:l1_loss").higher_is_better


def test_what_misses_a_target_is_written_beside_the_output(toys, monkeypatch):
    import bayeszip.ending
    import bayeszip.targets
    from bayeszip import compressing

    monkeypatch.setattr(bayeszip.targets, "FINER", (1,))
    monkeypatch.setattr(bayeszip.ending, "FINER", (1,))
    monkeypatch.setattr(compressing, "ATTEMPTS", 1)
    changes = ("l2.epochs=1000", "l2.rate_theta=0.01", "all.rate_theta=3", "all.distillation=0", "closing.epochs=0")
    settings = [word for change in changes for word in ("--set", change)]
    done = run(*COMPRESS, "--loss", "mse", "--max-loss-increase", "0", *settings)
    assert done.exit_code == 1
    assert "has a validation loss of" in done.stderr
    assert "What was reached is in net.nearest.bayz" in done.stderr
    assert bayeszip.load(toys / "net.nearest.bayz") is not None
    assert not (toys / "net.bayz").exists()
    assert issubclass(TargetError, bayeszip.BayeszipError)
