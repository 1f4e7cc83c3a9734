"""What a compression says that it will do, and whether it does."""

import contextlib
import dataclasses
import time

import pytest
import torch
from torch import nn

import bayeszip
from bayeszip import previewing
from bayeszip.errors import DataError, ModelError, RecipeError, TargetError
from bayeszip.fitting import ResidentBatches, Watcher
from bayeszip.previewing import _Work
from bayeszip.recipe import recipe
from bayeszip.targets import Target

INPUTS = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(96) % 3
FEW = recipe("quick").override("all.epochs=3", "closing.epochs=1", "l2.epochs=2")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 20), nn.LayerNorm(20), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3))
    net[4].requires_grad_(False)
    return net


def batches(size=16):
    return ResidentBatches(INPUTS, LABELS, size)


def test_it_says_what_compress_then_does():
    net = network()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    chosen = {"exclude": ["2.bias"], "strengths": {"0": 2.0}}
    seen = bayeszip.preview(net, batches(), recipe=FEW, device="cpu", **chosen)
    result = bayeszip.compress(net, batches(), recipe=FEW, device="cpu", watcher=Watcher(), **chosen)
    assert seen.conversion == result.fit.conversion
    assert seen.tensors == {"0.weight": (160, 2.0), "0.bias": (20, 2.0), "2.weight": (400, 1.0)}
    assert seen.parameters == result.compressed.original_parameters
    assert 0 < seen.floor <= result.bytes
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_terms_that_must_be_told_something_at_their_start_are():
    terms = FEW.override("all.rate.tau=0.5", "all.groups.tau=1")
    assert bayeszip.preview(network(), batches(), recipe=terms, device="cpu", pretrain=True).seconds > 0


def test_the_time_grows_with_the_training():
    short = bayeszip.preview(network(), batches(), recipe=FEW, device="cpu").seconds
    long = bayeszip.preview(network(), batches(), recipe=FEW.override("epochs_scale=1000"), device="cpu").seconds
    assert 0 < 10 * short < long
    said = bayeszip.preview(network(), batches(), recipe=FEW, settings={"epochs_scale": 1000}, device="cpu").seconds
    assert 0 < 10 * short < said


def test_tracing_and_coding_take_their_time_for_each_file(monkeypatch):
    floor = previewing.smallest_size

    def slow(*given):
        time.sleep(1)
        return floor(*given)

    warm, quick = (bayeszip.preview(network(), batches(), recipe=FEW, device="cpu").seconds for _ in range(2))
    monkeypatch.setattr(previewing, "smallest_size", slow)
    # When the training begins, when it ends, and as `pack` does.
    assert bayeszip.preview(network(), batches(), recipe=FEW, device="cpu").seconds > 3
    assert min(warm, quick) < 3


def test_data_of_fewer_steps_than_are_timed_and_loaders_without_a_length():
    options = {"recipe": FEW, "device": "cpu", "pretrain": True}
    assert bayeszip.preview(network(), [(INPUTS, LABELS)], val_loader=[(INPUTS, LABELS)], **options).seconds > 0

    class Stream:
        n_examples = 96

        def __iter__(self):
            return iter([(INPUTS[:48], LABELS[:48]), (INPUTS[48:], LABELS[48:])])

    assert bayeszip.preview(network(), Stream(), **options).seconds > 0


def test_the_report_names_what_is_not_pruned_and_why():
    report = bayeszip.preview(network(), batches(), recipe=FEW, device="cpu", exclude=["0"]).report()
    lines = [" ".join(line.split()) for line in report.splitlines()]
    assert lines[0] == "parameters 703, of them 420 to be pruned and shared"
    assert "pruned 2.weight: 400" in lines
    assert "not pruned 0 (Linear, excluded): trained, then folded, rounded or clustered" in lines
    assert "not pruned 4 (Linear, frozen): stays as it is" in lines
    assert any(line.startswith("no file is below") for line in lines)
    assert any(line.startswith("time at most") and line.endswith("on cpu") for line in lines)


def test_mistakes_are_told_as_compress_tells_them():
    with pytest.raises(ModelError, match="no parameter or module is called 'encoder'"):
        bayeszip.preview(network(), batches(), recipe=FEW, exclude=["encoder"])


def test_a_teacher_and_validation_are_asked_about_a_few_batches():
    seen = []

    class Counting(nn.Sequential):
        def forward(self, inputs):
            seen.append(len(inputs))
            return super().forward(inputs)

    many = ResidentBatches(INPUTS.repeat(100, 1), LABELS.repeat(100), 16)
    found = bayeszip.preview(Counting(*network()), many, val_loader=many, recipe=FEW, device="cpu", pretrain=True)
    assert sum(seen) < many.n_examples
    assert found.seconds > 0


def test_steps_are_timed_as_they_will_be_taken():
    """With augmented inputs, and in the precision that is asked for."""
    changed, precisions = [], set()

    class Looking(nn.Sequential):
        def forward(self, inputs):
            if self.training:
                precisions.add(torch.is_autocast_enabled("cpu"))
            return super().forward(inputs)

    def noisy(inputs):
        changed.append(len(inputs))
        return inputs

    options = {"recipe": FEW, "device": "cpu", "pretrain": True, "augment": noisy, "mixed_precision": "bf16"}
    assert bayeszip.preview(Looking(*network()), batches(), **options).seconds > 0
    assert set(changed) == {16}
    assert precisions == {True}


def test_a_recipe_of_pretraining_alone():
    seen = bayeszip.preview(network(), batches(), recipe=recipe("l2").override("l2.epochs=2"), pretrain=True)
    assert seen.seconds > 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"recipe": FEW.override("l2.epochs=0"), "pretrain": True}, RecipeError, "quick has no pretraining"),
        ({"settings": {"quantization.curvature": 1}}, RecipeError, "quantization.curvature says what moves cost"),
        ({"settings": {"quantization.rate": 1, "quantization.rate_trials": 2}}, RecipeError, "rate_trials are judged"),
        ({"max_accuracy_drop": 1}, DataError, "max_accuracy_drop is measured on validation data"),
        ({"metric": len}, RecipeError, "metric= is measured on validation data"),
        ({"max_metric_drop": 1, "val_loader": batches()}, RecipeError, "max_metric_drop is about a metric"),
        ({"max_bytes": 400, "rates": (1,)}, RecipeError, "a target decides how small the file is"),
        ({"max_bytes": 10}, TargetError, "10"),
        ({"val_loader": 3}, DataError, "val_loader must give batches"),
        ({"mixed_precision": "fp8"}, RecipeError, "mixed precision must be one of no, bf16, not fp8"),
        ({"augment": "turn"}, RecipeError, "augment can't be 'turn'"),
        ({"augment": "shift=2"}, DataError, "shift=2 changes images"),
    ],
)
def test_it_refuses_what_compress_refuses_in_the_same_words(options, error, message):
    options = {"recipe": FEW, "device": "cpu", **options}
    with pytest.raises(error, match=message) as by_preview:
        bayeszip.preview(network(), batches(), **options)
    with pytest.raises(error) as by_compress:
        bayeszip.compress(network(), batches(), watcher=Watcher(), **options)
    assert str(by_preview.value) == str(by_compress.value)


def test_a_phase_without_epochs_takes_no_time():
    none = dataclasses.replace(FEW.pretraining[0], name="none", epochs=0)
    more = dataclasses.replace(FEW, pretraining=(none, *FEW.pretraining))
    assert bayeszip.preview(network(), batches(), recipe=more, device="cpu", pretrain=True).seconds > 0


def test_a_closing_phase_takes_time_where_no_phase_is_before_it():
    alone = dataclasses.replace(FEW.override("closing.epochs=4", "quantization.assignment=fit"), phases=())
    assert bayeszip.preview(network(), batches(), recipe=alone, device="cpu").seconds > 0


def test_all_that_may_be_tried_is_counted():
    """So many trainings and closing phases that `compress` has no more, whatever it finds."""
    plain, trials = FEW, FEW.override("quantization.rate=1", "quantization.rate_trials=3")
    assert _Work.of(plain, None, 0, True) == _Work(1, 1)
    assert _Work.of(plain, None, 2, True) == _Work(1, 3)
    assert _Work.of(trials, None, 0, True) == _Work(1, 4)
    assert _Work.of(plain, Target(max_bytes=900), 0, True) == _Work(1, 1)
    kept = _Work.of(plain, Target(max_accuracy_drop=0.0), 0, True)
    closings = []

    class Counting(Watcher):
        def on_phase(self, course):
            closings.append(course.phase.name)

    with contextlib.suppress(TargetError):
        bayeszip.compress(
            network(), batches(), val_loader=batches(), recipe=FEW, watcher=Counting(), max_accuracy_drop=0.0
        )
    assert closings.count(FEW.phases[0].name) <= kept.attempts == 3
    assert closings.count("closing") <= kept.closings
    said = bayeszip.preview(network(), batches(), val_loader=batches(), recipe=FEW, max_accuracy_drop=0.0)
    assert said.to_dict()["attempts"] == 3
    assert "for 3 trainings, of which the first may do" in " ".join(said.report().split())
