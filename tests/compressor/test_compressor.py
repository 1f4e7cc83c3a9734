"""Compression inside a loop of one's own: the same as `compress`, under every kind of loop, and misuse is named."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bayeszip
from bayeszip.compressor import Compressor
from bayeszip.errors import CheckpointError, DataError, ModelError, RecipeError, TargetError, TrainingError
from bayeszip.fitting import ResidentBatches, Watcher, evaluate
from bayeszip.fitting.checkpoint import read_checkpoint, write_checkpoint
from bayeszip.fitting.course import RATE
from bayeszip.recipe import recipe
from bayeszip.variational.layers import VariationalLinear

RECIPE = recipe("quick").override(
    "all.epochs=8", "all.compact_every=0", "vd.tau1=0.3", "vd+sws.tau1=0.3", "vd.rate_theta=0.01", "closing.epochs=2",
    "all.rate_log_sigma2=0.02", "mixture.components=9", "all.distillation=0", "closing.distillation=0", "batch_size=64",
)  # fmt: skip
#: For networks whose training doesn't matter.
SHORT = recipe("quick").override("all.epochs=1", "batch_size=64", "mixture.components=5")
N = 512


def blobs(n=N, features=12, classes=3, seed=0):
    """Gaussian clouds; only the first four features tell the classes apart."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    inputs = torch.randn(n, features, generator=generator)
    inputs[:, :4] += 3 * F.one_hot(labels, 4).float()
    return inputs, labels


def batches(seed=0):
    return ResidentBatches(*blobs(seed=seed), 64, shuffle=True, seed=seed)


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)).eval()


def in_order():
    return list(zip(*(part.split(64) for part in blobs()), strict=True))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))


@pytest.fixture(scope="module")
def pretrained():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    data = batches()
    for _ in range(8):
        for inputs, targets in data:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return model


@pytest.fixture
def model(pretrained):
    return copy.deepcopy(pretrained)


def train(compressor, network, *, steps=None, accumulate=1, autocast=False, clip=None, optimizer=None, data=None):
    """A loop as users write it."""
    optimizer = optimizer or torch.optim.Adam(compressor.parameter_groups(), fused=True)
    compressor.set_rates_of(optimizer)
    data, taken = data or batches(), 0
    while True:
        for inputs, targets in data:
            if taken == (compressor.total_steps if steps is None else steps):
                return optimizer
            for x, y in zip(inputs.chunk(accumulate), targets.chunk(accumulate), strict=True):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = F.cross_entropy(network(x), y) + compressor.regularizer()
                (loss / accumulate).backward()
            if clip:
                nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
            optimizer.step()
            optimizer.zero_grad()
            compressor.step()
            taken += 1


def compressor_of(model, settings=RECIPE, **options):
    return Compressor(model, settings, n_data=N, **options)


def everything(compressor):
    return [*compressor.model.named_parameters(), *compressor.terms[1].named_parameters()]


def accuracy(network):
    return evaluate(network, [blobs(seed=2)])


def test_a_loop_of_ones_own_gives_the_very_file_that_compress_gives(model):
    # One phase: `compress` gives every phase an Adam of its own.
    settings = recipe("quick").override(
        "vd.epochs=0", "vd+sws.epochs=6", "all.compact_every=0", "all.distillation=0", "closing.epochs=0",
        "all.reseed=true", "batch_size=64", "all.rate_log_sigma2=0.02", "mixture.components=9",
    )  # fmt: skip
    data = in_order()
    expected = bayeszip.compress(model, data, recipe=settings, device="cpu", seed=3, watcher=Watcher())
    compressor = compressor_of(model, settings)
    torch.manual_seed(3)
    train(compressor, model, data=data)
    result = compressor.finalize(example_inputs=(blobs()[0][:2],))
    assert result.blob == expected.blob


def test_the_whole_way(model, tmp_path):
    before, outputs = accuracy(model), copy.deepcopy(model)(blobs(seed=2)[0])
    compressor = compressor_of(model)
    assert isinstance(model[0], VariationalLinear)
    assert compressor.total_steps == 16 * 8
    # The network still computes what it did, and says so in eval mode.
    assert torch.equal(model.eval()(blobs(seed=2)[0]), outputs)
    model.train()
    torch.manual_seed(1)
    train(compressor, model)
    last = compressor.stats()
    assert last.progress == 1
    assert last.phase == "vd+sws"
    assert last.zeros > 0.5
    result = compressor.finalize(example_inputs=(blobs()[0][:2],), train_loader=batches(), val_loader=batches(1))
    assert type(model[0]) is nn.Linear
    assert torch.allclose(model(blobs(seed=2)[0]), result.model(blobs(seed=2)[0]), atol=1e-5)
    result.save(tmp_path / "net.bayz")
    assert accuracy(bayeszip.load(tmp_path / "net.bayz")) > before - 0.03
    assert result.bytes < 0.2 * 4 * sum(p.numel() for p in model.parameters())
    assert abs(result.bytes - last.bytes) < 60
    assert "quick" in result.report()


@pytest.mark.parametrize(
    "loop",
    [{"accumulate": 4}, {"autocast": True}, {"clip": 1.0}, {"accumulate": 2, "autocast": True, "clip": 1.0}],
    ids=lambda loop: "+".join(loop),
)
def test_loops_of_all_kinds_compress(model, loop):
    compressor = compressor_of(model)
    torch.manual_seed(1)
    train(compressor, model, **loop)
    stats = compressor.stats()
    assert (stats.step, stats.progress) == (compressor.total_steps, 1)
    result = compressor.finalize(example_inputs=(blobs()[0][:2],))
    assert accuracy(result.model) > 0.9
    assert result.compressed.nonzero < 0.5 * result.compressed.original_parameters


def test_accumulated_batches_move_the_weights_as_one_batch_does(model):
    whole, parts = copy.deepcopy(model), copy.deepcopy(model)
    settings = recipe("paper-sws").override("batch_size=64", "all.tau2=1", "all.epochs=1")  # no noise
    for network, accumulate in ((whole, 1), (parts, 4)):
        train(compressor_of(network, settings), network, steps=3, accumulate=accumulate)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_networks_train_alike(model, backend):
    compressor = compressor_of(model)
    torch.manual_seed(1)
    train(compressor, torch.compile(model, backend=backend))
    assert compressor.stats().zeros > 0.5
    assert accuracy(compressor.finalize(example_inputs=(blobs()[0][:2],)).model) > 0.9


def test_a_network_that_was_compiled_before(model):
    compiled = torch.compile(model, backend="eager")
    compiled(blobs()[0])
    compressor = compressor_of(compiled, SHORT)
    train(compressor, compiled)
    result = compressor.finalize(example_inputs=(blobs()[0][:2],))
    assert set(result.compressed.tensors) <= {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_the_regularizer_is_a_float32_scalar_divided_by_n(model):
    double = copy.deepcopy(model)
    one, two = compressor_of(model, SHORT), Compressor(double, SHORT, n_data=2 * N, steps_per_epoch=8)
    for compressor in (one, two):
        for _ in range(5):
            compressor.step()
    with torch.autocast("cpu", torch.bfloat16):
        value = one.regularizer()
    assert value.dtype == torch.float32
    assert value.shape == ()
    assert value.item() == pytest.approx(2 * two.regularizer().item(), rel=1e-5)
    one.strength = 2.0
    assert one.regularizer().item() == pytest.approx(2 * value.item(), rel=1e-5)


def test_phases_follow_each_other_with_their_rates_and_widths(model):
    compressor = compressor_of(model, RECIPE.override("vd+sws.epochs=4"), steps_per_epoch=5)
    optimizer = torch.optim.SGD(compressor.parameter_groups())
    compressor.set_rates_of(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02, 1e-4, 1e-4, 3e-3]
    seen = []
    while compressor.stats().progress < 1:
        seen.append(compressor.phase.name)
        compressor.step()
    assert seen == ["vd"] * 40 + ["vd+sws"] * 20
    assert compressor.terms[1].log_precisions.exp().rsqrt().max().item() == pytest.approx(0.003, rel=1e-3)
    assert optimizer.param_groups[0]["lr"] == 0


def test_total_steps_are_shared_out_by_epochs(model):
    compressor = compressor_of(model, RECIPE.override("vd.epochs=30", "vd+sws.epochs=10"), total_steps=100)
    assert compressor.total_steps == 100
    for _ in range(75):
        assert compressor.phase.name == "vd"
        compressor.step()
    assert compressor.phase.name == "vd+sws"


def test_gradients_can_be_added_where_the_loss_is_out_of_reach(model):
    other = copy.deepcopy(model)
    one, two = compressor_of(model, SHORT), compressor_of(other, SHORT)
    inputs, targets = blobs(64)
    for compressor, network in ((one, model.eval()), (two, other.eval())):
        for _ in range(9):
            compressor.step()
        loss = F.cross_entropy(network(inputs), targets)
        if compressor is one:
            (loss + compressor.regularizer()).backward()
        else:
            loss.backward()
            compressor.add_gradients()
    assert one.terms[1].means.grad.abs().sum() > 0
    for (name, a), (_, b) in zip(everything(one), everything(two), strict=True):
        # The components are held at their width, which is therefore not trained.
        assert (a.grad is None) == (b.grad is None) == (name == "log_precisions"), name
        assert a.grad is None or torch.allclose(a.grad, b.grad, atol=1e-7), name


def test_distillation_mixes_in_the_network_as_it_was(model):
    compressor = compressor_of(model, SHORT)
    inputs, targets = blobs(64)
    outputs = model.eval()(inputs)
    loss = F.cross_entropy(outputs, targets)
    mixed = compressor.distill(loss, outputs, inputs)
    soft = F.softmax(outputs.detach() / 2, dim=-1)
    assert mixed.item() == pytest.approx(0.5 * loss.item() + 0.5 * 4 * F.cross_entropy(outputs / 2, soft).item())
    assert compressor_of(copy.deepcopy(mlp()), RECIPE).distill(loss, outputs, inputs) is loss


def test_distillation_mixes_in_a_teacher_of_ones_own(model):
    teacher = nn.Linear(12, 3)
    compressor = Compressor(model, SHORT, n_data=N, teacher=teacher)
    inputs, targets = blobs(64)
    outputs = model.eval()(inputs)
    loss = F.cross_entropy(outputs, targets)
    mixed = compressor.distill(loss, outputs, inputs)
    soft = F.softmax(teacher(inputs) / 2, dim=-1)
    assert mixed.item() == pytest.approx(0.5 * loss.item() + 0.5 * 4 * F.cross_entropy(outputs / 2, soft).item())
    # What is saved is the network as it was.
    assert set(compressor.state_dict()["teacher"]["tensors"]) == {name for name, _ in mlp().named_parameters()}
    with pytest.raises(ModelError, match="the teacher answers"):
        Compressor(mlp(), SHORT, n_data=N, teacher=nn.Linear(12, 5)).distill(loss, outputs, inputs)
    with pytest.raises(ModelError, match="the teacher answers"):
        Compressor(mlp(), SHORT, n_data=N, teacher=nn.Linear(12, 5), example_inputs=(inputs,))
    with pytest.raises(RecipeError, match="asks a teacher"):
        Compressor(mlp(), RECIPE, n_data=N, teacher=teacher)


@pytest.mark.parametrize("given", [False, True], ids=["the network as it was", "one's own"])
def test_the_closing_phase_asks_its_teacher_where_the_model_is(monkeypatch, given):
    """A model that is moved after the Compressor was made leaves the teacher behind; here only the asking shows."""
    moved = []

    class Followed(nn.Sequential):
        def to(self, *where):
            moved.append(where)
            return super().to(*where)

    network, teacher = Followed(*mlp()), Followed(*mlp())
    settings = SHORT.override("closing.epochs=1", "closing.distillation=0.5")
    compressor = compressor_of(network, settings, total_steps=2, teacher=teacher if given else None)
    for _ in range(2):
        compressor.step()
    monkeypatch.setattr(Compressor, "_device", torch.device("cpu", 0))
    moved.clear()
    compressor.finalize(train_loader=in_order())
    assert (torch.device("cpu", 0),) in moved


class Sum(nn.Module):
    """Two layers, each of an input of its own."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(12, 3), nn.Linear(12, 3)

    def forward(self, first, second):
        return self.one(first) + self.two(second)


class Swapped(Sum):
    """The same, with its inputs in another order."""

    def forward(self, second, first):
        return super().forward(first, second)


@pytest.mark.parametrize("named", [False, True], ids=["in order", "by name"])
def test_a_teacher_is_given_inputs_by_their_names(named):
    first, second = blobs(64)[0], blobs(64, seed=1)[0]
    examples = {"second": second, "first": first} if named else (first, second)
    teacher, settings = Swapped(), SHORT.override("all.distillation=1", "all.distillation_temperature=1")
    compressor = Compressor(Sum(), settings, n_data=N, teacher=teacher, example_inputs=examples)
    outputs = compressor.model.eval()(first, second)
    mixed = compressor.distill(outputs.sum(), outputs, first, second)
    right = F.cross_entropy(outputs, F.softmax(teacher(first=first, second=second), dim=-1))
    assert mixed.item() == pytest.approx(right.item())


def test_a_network_that_passes_on_what_it_is_given_learns_from_itself():
    class Passing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Sum()

        def forward(self, *inputs, **named):
            return self.inner(*inputs, **named)

    first, second = blobs(64)[0], blobs(64, seed=1)[0]
    compressor = compressor_of(Passing(), SHORT.override("all.distillation=1", "all.distillation_temperature=1"))
    outputs = compressor.model.eval()(first, second)
    mixed = compressor.distill(outputs.sum(), outputs, first, second)
    assert mixed.item() == pytest.approx(F.cross_entropy(outputs, F.softmax(outputs, dim=-1)).item())


def test_a_teacher_is_imitated_by_the_noise_that_was_measured():
    inputs = blobs(64)[0]
    data = [(inputs, inputs[:, :3])]

    def apart(outputs, targets):
        return (outputs - targets).square().mean()

    settings = SHORT.override("closing.epochs=1", "closing.distillation=0.5")
    compressor = Compressor(mlp(), settings, n_data=N, total_steps=2, loss=apart, teacher=nn.Linear(12, 3))
    compressor.measure_noise(data)
    for _ in range(2):
        compressor.step()
    assert compressor.finalize(train_loader=data, loss=apart).bytes


def test_a_network_that_keeps_its_features_is_copied_in_the_loop():
    class Keeping(nn.Sequential):
        def forward(self, inputs):
            self.features = super().forward(inputs)
            return self.features

    network, (inputs, targets) = Keeping(*mlp()), blobs(64)
    F.cross_entropy(network(inputs), targets).backward()
    compressor = Compressor(network, SHORT, n_data=N, total_steps=2)
    for _ in range(2):
        (F.cross_entropy(network(inputs), targets) + compressor.regularizer()).backward()
        compressor.step()
        assert compressor.stats().bytes
    assert compressor.finalize(example_inputs=inputs).bytes


def test_what_the_training_came_to_is_told(model):
    compressor = compressor_of(model, RECIPE.override("closing.epochs=0"))
    train(compressor, model)
    trained = compressor.judge_on(batches(seed=1))
    result = compressor.finalize(val_loader=batches(seed=1))
    assert result.trained == trained
    assert result.accuracy_trained == trained.accuracy


def summed(outputs, targets):
    """A loss that holds the sum of a network's outputs against one number."""
    return (outputs.sum(1) - targets).square().mean()


def test_a_teacher_that_the_loss_would_pass_over_is_refused():
    inputs, targets = blobs(64)
    compressor = Compressor(mlp(), SHORT, n_data=N, loss=summed, teacher=nn.Linear(12, 3))
    outputs = compressor.model(inputs)
    loss = summed(outputs, targets.float())
    with pytest.raises(
        RecipeError, match=r"under the loss summed: outputs \(64, 3\) .*not given are neither classes nor"
    ):
        compressor.distill(loss, outputs, inputs)
    with pytest.raises(RecipeError, match=r"nobody measured .*Call measure_noise\(\) before the first step, or name"):
        compressor.distill(loss, outputs, inputs, targets=torch.zeros_like(outputs))
    assert compressor.distill(loss, outputs, inputs, targets=targets) is not loss
    for _ in range(compressor.total_steps):
        compressor.step()
    with pytest.raises(RecipeError, match="under the loss summed"):
        compressor.finalize(train_loader=[(inputs, targets.float())], example_inputs=inputs)
    # It can be ended otherwise.
    assert compressor.finalize(example_inputs=inputs).bytes


@pytest.mark.parametrize("units", ["network", "layer"])
def test_a_run_that_was_saved_goes_on_as_if_nothing_had_happened(model, tmp_path, units):
    interrupted = copy.deepcopy(model)
    data = in_order()
    settings = RECIPE.override("all.epochs=2", f"mixture.units={units}")
    whole = compressor_of(model, settings)
    torch.manual_seed(1)
    train(whole, model, data=data)

    first = compressor_of(interrupted, settings)
    torch.manual_seed(1)
    optimizer = train(first, interrupted, data=data, steps=16)
    write_checkpoint(tmp_path / "c.safetensors", {**first.state_dict(), "adam": optimizer.state_dict()}, {})
    noise = torch.get_rng_state()

    fresh = mlp()
    second = compressor_of(fresh, settings)
    state = read_checkpoint(tmp_path / "c.safetensors").state
    adam = torch.optim.Adam(second.parameter_groups(), fused=True)
    adam.load_state_dict(state["adam"])
    second.load_state_dict(state)
    torch.set_rng_state(noise)
    train(second, fresh, data=data, steps=16, optimizer=adam)
    for (name, one), (_, other) in zip(everything(whole), everything(second), strict=True):
        assert torch.equal(one, other), name


def test_states_of_others_are_refused(model):
    state = compressor_of(copy.deepcopy(model)).state_dict()
    with pytest.raises(CheckpointError, match=r"recipe\.mixture\.components: 9 then, 5 now"):
        compressor_of(copy.deepcopy(model), RECIPE.override("mixture.components=5")).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"model\.0\.weight"):
        compressor_of(nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))).load_state_dict(state)
    with pytest.raises(CheckpointError, match="lacks"):
        compressor_of(model).load_state_dict({"step": 3})


def test_a_file_can_be_held_to_a_number_of_bytes(model):
    compressor = compressor_of(model)
    train(compressor, model, steps=32, data=batches())
    with pytest.warns(UserWarning, match="32 of 128 steps"):
        result = compressor.finalize(example_inputs=(blobs()[0][:2],), max_bytes=300)
    assert 285 <= result.bytes <= 300


@pytest.mark.parametrize("rate", [16, 1e6])
def test_the_model_takes_the_values_of_the_rate_that_trials_chose(model, rate):
    settings = RECIPE.override(f"quantization.rate={rate}", "quantization.rate_trials=1", "quantization.rate_drop=1")
    compressor = compressor_of(model, settings)
    train(compressor, model, data=batches())
    with pytest.raises(RecipeError, match="judged on validation data"):
        compressor.finalize(example_inputs=(blobs()[0][:2],))
    result = compressor.finalize(example_inputs=(blobs()[0][:2],), val_loader=[blobs(seed=2)])
    assert result.rate == (rate if rate < 1e6 else 0.0)
    assert torch.allclose(model(blobs(seed=2)[0]), result.model(blobs(seed=2)[0]), atol=1e-5)


def test_a_curvature_that_nothing_asks_for_is_refused_at_once():
    with pytest.raises(RecipeError, match=r"set quantization\.rate, or set it to 0"):
        Compressor(mlp(), RECIPE.override("quantization.curvature=1"), n_data=N)


def test_a_training_may_be_ended_by_another_ending():
    told = Compressor(mlp(), RECIPE, n_data=N).state_dict()
    other = RECIPE.override("quantization.rate=1", "coding.norms=keep", "reassign=true")
    Compressor(mlp(), other, n_data=N).load_state_dict(told)
    with pytest.raises(CheckpointError, match="tau1"):
        Compressor(mlp(), RECIPE.override("all.tau1=3"), n_data=N).load_state_dict(told)


@pytest.mark.parametrize("term", ["rate", "groups"])
def test_variances_are_hurried_whatever_prunes(term):
    """Few steps have to do, by a divergence or without one."""
    recipe = RECIPE.override("all.tau1=0", f"all.{term}.tau=1")
    compressor = Compressor(mlp(), recipe, n_data=N, total_steps=30)
    (own,) = (group["lr"] for group in compressor.parameter_groups() if group[RATE] == "rate_log_sigma2")
    assert own > 2 * recipe.phases[0].rate_log_sigma2


def test_a_curvature_needs_training_data(model):
    settings = RECIPE.override("quantization.rate=4", "quantization.curvature=1")
    compressor = compressor_of(model, settings)
    train(compressor, model, data=batches())
    with pytest.raises(RecipeError, match=r"seen on training data; give some \(train_loader\)"):
        compressor.finalize(example_inputs=(blobs()[0][:2],))
    result = compressor.finalize(example_inputs=(blobs()[0][:2],), train_loader=batches())
    assert result.rate == 4
    assert torch.allclose(model(blobs(seed=2)[0]), result.model(blobs(seed=2)[0]), atol=1e-5)


def test_a_budget_out_of_reach_is_named(model):
    compressor = compressor_of(model, SHORT)
    train(compressor, model)
    with pytest.raises(TargetError, match="out of reach"):
        compressor.finalize(max_bytes=10)


def test_misuse_is_named(model):
    for options, message in [
        ({"n_data": 0}, "n_data"),
        ({"n_data": 8, "batch_size": 0}, "batch_size"),
        ({"n_data": 8, "steps_per_epoch": 2, "total_steps": 3}, "one of"),
    ]:
        with pytest.raises(RecipeError, match=message):
            Compressor(copy.deepcopy(model), SHORT, **options)
    with pytest.raises(RecipeError, match="there is no recipe"):
        compressor_of(copy.deepcopy(model), "nope")
    with pytest.raises(RecipeError, match="no phase"):
        compressor_of(copy.deepcopy(model), "l2")
    compressor = compressor_of(model, SHORT)
    with pytest.raises(RecipeError, match=r"the optimizer lacks 0\.weight_log_sigma2"):
        compressor.set_rates_of(torch.optim.SGD([model[0].weight], 0.1))
    with pytest.raises(TrainingError, match="never called"):
        compressor.finalize()
    train(compressor, model)
    compressor.finalize()
    for call in (compressor.regularizer, compressor.step, compressor.stats, compressor.state_dict, compressor.finalize):
        with pytest.raises(TrainingError, match="after finalize"):
            call()


class Failing:
    """Batches of a disk that is gone after so many."""

    n_examples = N

    def __init__(self, given):
        self.given = given

    def __iter__(self):
        yield from in_order()[: self.given]
        raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_bytes": 5}, TargetError),
        ({"train_loader": Failing(2), "loss": lambda outputs, targets: 0 * outputs.sum()}, DataError),
        ({"val_loader": Failing(2)}, DataError),
        ({"val_loader": Failing(0)}, DataError),
    ],
    ids=["target", "training data", "validation data", "no validation data"],
)
def test_an_ending_that_fails_costs_nothing(options, error):
    """Neither the network nor its variances are touched, and the next call gives what the first would have."""
    endings = []
    for fails in (False, True):
        network = nn.Sequential(*normed(), nn.Linear(3, 3), nn.Linear(3, 3))
        network[5].weight = network[4].weight
        compressor = compressor_of(network, SHORT.override("closing.epochs=1"), total_steps=2)
        torch.manual_seed(1)
        train(compressor, network)
        before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        if fails:
            with pytest.raises(error):
                compressor.finalize(example_inputs=(blobs()[0][:2],), **options)
            assert type(network[0]) is VariationalLinear
            after = network.state_dict()
            assert after.keys() == before.keys()
            assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
            assert compressor.stats().progress == 1
        torch.manual_seed(2)
        result = compressor.finalize(example_inputs=(blobs()[0][:2],), train_loader=in_order(), max_bytes=400)
        endings.append((result.blob, network))
    (expected, other), (blob, network) = endings
    assert blob == expected
    assert type(network[0]) is nn.Linear
    assert network[5].weight is network[4].weight
    assert all(torch.equal(network.state_dict()[name], tensor) for name, tensor in other.state_dict().items())
    x = blobs(seed=2)[0]
    assert torch.allclose(network(x), result.model(x), atol=0.01)


def test_what_is_not_finite_is_named(model):
    compressor = compressor_of(model, SHORT)
    compressor.step()
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    with pytest.raises(TrainingError, match=r"phase vd, step 2: 2\.weight is no longer finite"):
        compressor.step()
    with pytest.warns(UserWarning, match="not over"), pytest.raises(TrainingError, match=r"2\.weight"):
        compressor.finalize()


def test_wrapped_networks_are_refused():
    with pytest.raises(ModelError, match="wrapped in DataParallel"):
        compressor_of(nn.DataParallel(mlp()))


def test_few_steps_train_variances_faster_so_that_they_get_where_they_must(model):
    slow = RECIPE.override("all.rate_log_sigma2=1e-4")
    rates = {}
    for steps in (100, 200_000):
        compressor = compressor_of(copy.deepcopy(model), slow, total_steps=steps)
        groups = {group["bayeszip_rate"]: group["lr"] for group in compressor.parameter_groups()}
        assert groups["rate_theta"] == 0.01
        rates[steps] = groups["rate_log_sigma2"]
    assert rates[200_000] == pytest.approx(1e-4)
    assert rates[100] == pytest.approx(0.05)
    # Where the steps are the recipe's own, so are the rates.
    assert compressor_of(model, slow).parameter_groups()[1]["lr"] == pytest.approx(1e-4)


def test_sizes_on_the_way_count_the_whole_file(model):
    class Waves(nn.Module):
        def __init__(self):
            super().__init__()
            self.factors = nn.Parameter(torch.randn(12, generator=torch.Generator().manual_seed(0)))

        def forward(self, inputs):
            return torch.sin(inputs * self.factors)

    network = nn.Sequential(Waves(), *model)
    compressor = compressor_of(
        network,
        RECIPE.override("vd+sws.epochs=0", "quantization.assignment=fit"),
        total_steps=1,
        example_inputs=(blobs()[0][:2], blobs()[1][:2]),
    )
    compressor.step()
    shown = compressor.stats().bytes
    result = compressor.finalize()
    assert result.without_graph is None
    assert 0.9 * result.bytes < shown < 1.1 * result.bytes
    assert any("0 could not be compressed and was left raw" in warning for warning in result.warnings)


def test_the_bytes_shown_count_a_layer_that_is_excluded_as_the_file_has_it(model):
    settings = RECIPE.override("vd+sws.epochs=0", "quantization.assignment=fit").selecting(exclude=["0"])
    wide = nn.Sequential(nn.Linear(blobs()[0].shape[1], 300), nn.ReLU(), nn.Linear(300, 3))
    compressor = compressor_of(wide, settings, total_steps=1, example_inputs=(blobs()[0][:2],))
    compressor.step()
    shown = compressor.stats().bytes
    result = compressor.finalize()
    assert 0.9 * result.bytes < shown < 1.1 * result.bytes


def test_modules_are_in_the_mode_that_they_were_in_after_a_look(model):
    network = nn.Sequential(*model, nn.BatchNorm1d(3))
    compressor = compressor_of(network)
    network.train()
    network[-1].eval()
    compressor.judge_on(batches(1))
    assert [network[0].training, network[-1].training] == [True, False]


def test_a_squared_distance_in_nats_and_figures_on_the_way():
    torch.manual_seed(0)
    inputs = torch.randn(128, 12)
    targets = inputs @ torch.randn(12, 3) + 0.5 * torch.randn(128, 3)
    network = nn.Linear(12, 3)
    compressor = compressor_of(network, SHORT, loss="mse")
    before = compressor.judge_on([(inputs, targets)]).loss
    assert before == pytest.approx(F.mse_loss(network.eval()(inputs), targets).item(), rel=1e-5)
    compressor.measure_noise([(inputs, targets)])
    # Three numbers an example, each with noise of the variance that is left: 3/2 nats.
    assert compressor.nats(network(inputs), targets).item() == pytest.approx(1.5, rel=1e-5)
    taught = network(inputs).detach()
    loss = compressor.nats(taught + 1, targets)
    mixed = compressor.distill(loss, taught + 1, inputs, targets=targets)
    assert mixed.item() == pytest.approx(0.5 * loss.item() + 0.5 * 3 / (2 * before), rel=1e-4)
    compressor.step()
    with pytest.raises(TrainingError, match="measure_noise"):
        compressor.measure_noise([(inputs, targets)])


def test_what_a_loop_damaged_is_said(model, caplog):
    compressor = compressor_of(model, SHORT.override("start_log_sigma2=10"), total_steps=2)
    for _ in range(2):
        compressor.step()
    with caplog.at_level("WARNING", logger="bayeszip"):
        result = compressor.finalize(example_inputs=blobs()[0][:2], val_loader=[blobs(seed=1)])
    assert result.fit.before.accuracy > 0.9 > result.accuracy
    assert any("no longer depend on its inputs" in warning for warning in result.warnings)
    assert "the compressed network is at chance" in caplog.text


def test_a_network_that_has_a_compressor_already_is_refused():
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    Compressor(network, "quick", n_data=8)
    with pytest.raises(ModelError, match="Sequential has Gaussian weights already, from a Compressor before this one"):
        Compressor(network, "quick", n_data=8)


def test_a_size_to_begin_with_needs_example_inputs():
    size = {"recipe": SHORT.override("start_size=0.05"), "n_data": N}
    with pytest.warns(
        UserWarning, match="would bring weights before norms to one size .* give example_inputs, or"
    ) as told:
        without = Compressor(normed(), **size)
    assert len(told) == 1
    assert torch.equal(without.model[0].weight, normed()[0].weight)
    brought = Compressor(normed(), **size, example_inputs=torch.zeros(2, 12)).model[0].weight
    assert brought.square().mean().sqrt().item() == pytest.approx(0.05, rel=1e-4)


def test_weight_decay_is_that_of_the_phase_at_hand():
    settings = SHORT.override("vd.weight_decay=0.1", "vd+sws.weight_decay=0.02")
    compressor = Compressor(mlp(), settings, n_data=N, steps_per_epoch=2)
    optimizer = torch.optim.SGD(compressor.parameter_groups())
    compressor.set_rates_of(optimizer)
    found = []
    for _ in range(compressor.total_steps):
        found.append([group["weight_decay"] for group in optimizer.param_groups])
        compressor.step()
    means, *others = zip(*found, strict=True)
    assert means == (0.1, 0.1, 0.02, 0.02)
    assert others
    assert not any(map(any, others))


def test_a_teacher_that_was_never_asked_is_told_of():
    inputs, targets = blobs(64)
    compressor = Compressor(mlp(), SHORT, n_data=64, teacher=mlp())
    for _ in range(compressor.total_steps):
        compressor.step()
    taken_up = Compressor(mlp(), SHORT, n_data=64, teacher=mlp())
    taken_up.load_state_dict(compressor.state_dict())
    with pytest.warns(
        UserWarning, match=r"nothing was learnt from the teacher: .*distill\(\), or give finalize a train"
    ):
        assert compressor.finalize(example_inputs=inputs).fit.teacher is None
    outputs = taken_up.model(inputs)
    taken_up.distill(F.cross_entropy(outputs, targets), outputs, inputs)
    assert taken_up.finalize(example_inputs=inputs).fit.teacher == "Sequential, 515 parameters"


def test_weights_that_others_read_are_found_by_the_example_inputs():
    class Mirrored(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.out = nn.Linear(12, 16), nn.Linear(12, 3)

        def forward(self, inputs):
            return self.out(F.linear(self.enc(inputs).relu(), self.enc.weight.t()))

    compressor = Compressor(Mirrored(), SHORT, n_data=N, example_inputs=blobs(2)[0])
    assert isinstance(compressor.model.out, VariationalLinear)
    assert not isinstance(compressor.model.enc, VariationalLinear)


def test_before_a_ramp_begins_the_regularizer_has_a_gradient_of_nothing():
    """Whoever accumulates gradients takes its own by itself, once a step."""
    compressor = Compressor(mlp(), RECIPE, n_data=N)
    compressor.regularizer().backward()
    weight = compressor.model[0].weight
    assert weight.grad is None or not weight.grad.any()


def test_inputs_that_the_network_does_not_take_are_refused_and_cost_nothing():
    with pytest.raises(ModelError, match=r"can't be run on example_inputs of shapes \(2, 5\)"):
        Compressor(mlp(), SHORT, n_data=64, example_inputs=torch.randn(2, 5))
    compressor = Compressor(mlp(), SHORT, n_data=64)
    for _ in range(compressor.total_steps):
        compressor.step()
    with pytest.raises(ModelError, match="can't be run on example_inputs"):
        compressor.finalize(example_inputs=torch.randn(2, 5))
    assert compressor.finalize(example_inputs=torch.randn(2, 12)).compressed.graph is not None
