"""Training: the same bits for the same seed, phases and their settings at work, and losses that stop it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from bayeszip.errors import DataError, ModelError, RecipeError, TrainingError
from bayeszip.fitting import EpochStats, Phase, ResidentBatches, Watcher, count_examples, evaluate, fit
from bayeszip.variational import Divergence, MixturePrior, Weighed, regularizer, to_variational, variational_weights


class Recorder(Watcher):
    def __init__(self) -> None:
        self.epochs: list[EpochStats] = []
        self.done: list[float] = []

    def on_batch(self, phase: Phase, done: float) -> None:
        self.done.append(done)

    def on_epoch(self, stats: EpochStats, course) -> None:
        self.epochs.append(stats)


def problem(n: int = 256, batch: int = 32, seed: int = 0) -> ResidentBatches:
    """Three classes that two of twelve inputs decide."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 12, generator=generator)
    targets = (inputs[:, 0] > 0.3).long() + (inputs[:, 1] > 0).long()
    return ResidentBatches(inputs, targets, batch, shuffle=True, seed=seed)


def build(seed: int = 0, variational: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    if variational:
        to_variational(network)
    return network


def prior_for(network: nn.Module) -> MixturePrior:
    return MixturePrior(5, torch.cat([w.theta.detach().flatten() for w in variational_weights(network)]).std().item())


PHASES = (
    Phase(name="vd", epochs=3, tau1=1.0, tau1_ramp=0.5, rate_theta=1e-2, rate_log_sigma2=5e-2, compact_every=1),
    Phase(name="sws", epochs=2, tau1=1.0, tau2=0.02, rate_theta=1e-3, schedule="cosine", reseed=True),
    Phase(name="close", epochs=1, tau1=1.0, tau2=0.5, std_first=0.05, std_last=0.01, tau2_ramp=0.5),
)


def run_all(seed: int) -> tuple[nn.Module, MixturePrior, Recorder]:
    network = build()
    prior, recorder = prior_for(network), Recorder()
    torch.manual_seed(seed)
    fit(network, problem(), PHASES, n_data=256, terms=(Divergence(), prior), validation=problem(), watcher=recorder)
    return network, prior, recorder


def test_the_same_seed_gives_the_same_bits():
    first, first_prior, recorder = run_all(seed=1)
    second, second_prior, _ = run_all(seed=1)
    other, _, _ = run_all(seed=2)
    for a, b in zip(
        (*first.parameters(), *first_prior.parameters()),
        (*second.parameters(), *second_prior.parameters()),
        strict=True,
    ):
        assert torch.equal(a, b)
    assert not torch.equal(first[0].weight, other[0].weight)
    assert [(s.phase, s.epoch, s.epochs) for s in recorder.epochs] == [
        ("vd", 1, 3), ("vd", 2, 3), ("vd", 3, 3), ("sws", 1, 2), ("sws", 2, 2), ("close", 1, 1),
    ]  # fmt: skip
    assert not first.training
    assert first[0].weight.shape == (16, 12)
    assert all(s.accuracy is not None and 0 <= s.accuracy <= 1 and 0 <= s.zeros <= 1 for s in recorder.epochs)


def test_it_learns_and_prunes():
    network = build()
    recorder = Recorder()
    phases = (
        Phase(name="l2", epochs=15, rate_theta=1e-2, noise=False),
        Phase(name="vd", epochs=60, tau1=1.0, rate_theta=1e-2, rate_log_sigma2=1e-1),
    )
    fit(network, problem(1024, 64), phases, n_data=1024, watcher=recorder, validation=problem(1024, 256))
    assert recorder.epochs[14].accuracy > 0.9
    assert recorder.epochs[-1].accuracy > 0.9
    assert recorder.epochs[-1].zeros > 0.4
    assert list(recorder.epochs[0].parts) == ["data"]


def test_one_step_is_adam_on_the_whole_loss():
    network, twin = build(), build()
    prior, twin_prior = prior_for(network), prior_for(twin)
    batch = next(iter(problem(32, 32)))
    phase = Phase(name="p", epochs=1, tau1=0.5, tau2=0.1, rate_theta=1e-2, rate_log_sigma2=2e-2, rate_means=3e-2)
    recorder = Recorder()
    torch.manual_seed(5)
    fit(network, [batch], (phase,), n_data=77, terms=(Divergence(), prior), watcher=recorder)

    torch.manual_seed(5)
    twin.train()
    nll = F.cross_entropy(twin(batch.inputs), batch.targets)
    terms = [Weighed(Divergence(), 0.5), Weighed(twin_prior, 0.1)]
    parts = regularizer(terms, tuple(variational_weights(twin)), n_data=77)
    (nll + sum(parts.values())).backward()
    variances = [w.log_sigma2 for w in variational_weights(twin)]
    means = [w.theta for w in variational_weights(twin)]
    rates = [(means, 1e-2), (variances, 2e-2), ([twin_prior.means], 3e-2), ([twin_prior.log_precisions], 1e-4)]
    rates.append(([twin_prior.log_proportions], 3e-3))
    torch.optim.Adam([{"params": group, "lr": rate} for group, rate in rates]).step()
    for ours, theirs in zip(
        (*network.parameters(), *prior.parameters()), (*twin.parameters(), *twin_prior.parameters()), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    expected = {"data": nll.item(), **{name: part.item() for name, part in parts.items()}}
    assert recorder.epochs[0].parts == pytest.approx(expected, rel=1e-5)


def test_soft_weight_sharing_alone_leaves_log_sigma2_out():
    phase = Phase(name="sws", epochs=2, noise=False, tau2=0.1, rate_theta=1e-2)
    outcomes = []
    for level in (-10.0, 3.0):
        network = build()
        prior = prior_for(network)
        with torch.no_grad():
            for weight in variational_weights(network):
                weight.log_sigma2.fill_(level)
        recorder = Recorder()
        fit(network, problem(), (phase,), n_data=256, terms=(Divergence(), prior), watcher=recorder)
        assert all((w.log_sigma2 == level).all() for w in variational_weights(network))
        outcomes.append(([w.theta.detach().clone() for w in variational_weights(network)], recorder.epochs[-1]))
    assert all(torch.equal(a, b) for a, b in zip(outcomes[0][0], outcomes[1][0], strict=True))
    assert outcomes[0][1].zeros == outcomes[1][1].zeros
    assert outcomes[0][1].parts == outcomes[1][1].parts


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_done_runs_from_zero_towards_one(schedule):
    recorder = Recorder()
    phase = Phase(name="p", epochs=2, schedule=schedule, noise=False)
    fit(build(variational=False), problem(), (phase,), n_data=256, watcher=recorder)
    assert recorder.done == [i / 16 for i in range(16)]


def test_tau_ramps_start_at_zero():
    network = build()
    recorder = Recorder()
    batch = next(iter(problem(32, 32)))
    phase = Phase(name="p", epochs=3, tau1=1.0, tau1_ramp=1.0, tau2=1.0, tau2_ramp=0.5, rate_theta=0.0)
    phase_rates = {"rate_log_sigma2": 0.0, "rate_means": 0.0, "rate_log_precisions": 0.0, "rate_log_proportions": 0.0}
    phase = Phase(**{**vars(phase), **phase_rates})
    fit(network, [batch], (phase,), n_data=32, terms=(Divergence(), prior_for(network)), watcher=recorder)
    kl, mixture = ([s.parts[name] for s in recorder.epochs] for name in ("divergence", "mixture"))
    assert kl[0] == mixture[0] == 0
    assert kl[2] == pytest.approx(2 * kl[1], rel=1e-5)
    assert mixture[2] == pytest.approx(mixture[1] / (2 / 3), rel=1e-5)


def test_rates_of_zero_change_nothing_and_zero_epochs_are_none():
    network = build()
    before = [p.detach().clone() for p in network.parameters()]
    still = Phase(name="still", epochs=1, tau1=1.0, rate_theta=0.0, rate_log_sigma2=0.0)
    recorder = Recorder()
    fit(network, problem(), (Phase(name="none", epochs=0, tau1=1.0), still), n_data=256, watcher=recorder)
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    assert [s.phase for s in recorder.epochs] == ["still"]


def test_tightened_components_end_near_the_last_deviation():
    network = build()
    prior = prior_for(network)
    phase = Phase(name="p", epochs=4, tau2=0.1, std_first=0.08, std_last=0.02, rate_log_precisions=0.1)
    fit(network, problem(256, 16), (phase,), n_data=256, terms=(Divergence(), prior))
    deviations = (-0.5 * prior.log_precisions).exp().detach()
    last = 0.08 * (0.02 / 0.08) ** (63 / 64)
    assert deviations.tolist() == pytest.approx([last] * 5, rel=1e-4)


def test_reseed_takes_what_pruning_keeps():
    network = build()
    with torch.no_grad():
        network[0].weight_log_sigma2.fill_(10)
        network[0].bias_log_sigma2.fill_(10)
        network[2].weight.copy_(torch.linspace(1, 2, 48).view(3, 16))
        network[2].bias.fill_(1.5)
    prior = prior_for(network)
    still = dict.fromkeys(("rate_theta", "rate_log_sigma2", "rate_means"), 0.0)
    fit(
        network,
        problem(),
        (Phase(name="p", epochs=1, tau2=0.1, reseed=True, **still),),
        n_data=256,
        terms=(Divergence(), prior),
    )
    assert 1 <= prior.means.min() < prior.means.max() <= 2


def test_distillation_asks_for_the_teachers_outputs():
    network, teacher = build(variational=False), build(seed=3, variational=False).eval()
    inputs = torch.randn(64, 12)
    wrong = torch.zeros(64, dtype=torch.long)
    phase = Phase(name="p", epochs=300, noise=False, distillation=1.0, rate_theta=1e-2)
    fit(network, [(inputs, wrong)], (phase,), n_data=64, teacher=teacher)
    difference = F.log_softmax(network(inputs), 1) - F.log_softmax(teacher(inputs), 1)
    assert difference.abs().mean() < 0.05
    assert all(p.grad is None for p in teacher.parameters())


def test_distillation_is_a_share_of_the_loss():
    network, teacher = build(variational=False), build(seed=3, variational=False).eval()
    batch = next(iter(problem(32, 32)))
    logits, wanted = network(batch.inputs), F.softmax(teacher(batch.inputs) / 4, 1)
    soft = -(wanted * F.log_softmax(logits / 4, 1)).sum(1).mean() * 16
    expected = 0.7 * F.cross_entropy(logits, batch.targets) + 0.3 * soft
    recorder = Recorder()
    phase = Phase(name="p", epochs=1, noise=False, distillation=0.3, distillation_temperature=4.0)
    fit(network, [batch], (phase,), n_data=32, teacher=teacher, watcher=recorder)
    assert recorder.epochs[0].parts["data"] == pytest.approx(expected.item(), rel=1e-5)


def test_weight_decay_shrinks_weights():
    norms = []
    for decay in (0.0, 1.0):
        network = build(variational=False)
        phase = Phase(name="l2", epochs=5, noise=False, rate_theta=1e-2, weight_decay=decay)
        fit(network, problem(), (phase,), n_data=256)
        norms.append(network[0].weight.norm().item())
    assert norms[1] < 0.8 * norms[0]


def test_frozen_parameters_stay():
    network = build()
    network[2].weight.requires_grad_(False)
    before = network[2].weight.clone()
    fit(network, problem(), (Phase(name="vd", epochs=1, tau1=1.0, rate_theta=1e-2),), n_data=256)
    assert torch.equal(network[2].weight, before)


def test_a_rate_too_large_stops_instead_of_going_on():
    network = build()
    phase = Phase(name="vd", epochs=20, tau1=1.0, rate_theta=1e30, rate_log_sigma2=1e3)
    with (
        pytest.warns(RuntimeWarning, match=r"phase vd, epoch \d+ of 20, step \d+: .* is not finite; going back"),
        pytest.raises(TrainingError, match=r"phase vd, epoch \d+ of 20, step \d+: .* for the second time\. Check"),
    ):
        fit(network, problem(), (phase,), n_data=256)


def test_an_interrupted_run_leaves_full_shapes():
    class Interrupting(Watcher):
        def on_epoch(self, stats: EpochStats, course) -> None:
            if stats.epoch == 2:
                assert network[0].weight.numel() < 12 * 16
                raise KeyboardInterrupt

    network = build()
    with torch.no_grad():
        network[0].weight_log_sigma2[:, 3:] = 10
    with pytest.raises(KeyboardInterrupt):
        fit(
            network,
            problem(),
            (Phase(name="vd", epochs=5, tau1=1.0, compact_every=1),),
            n_data=256,
            watcher=Interrupting(),
        )
    assert network[0].weight.shape == (16, 12)
    assert (network[0].weight[:, 3:] == 0).all()


def test_compaction_computes_fewer_weights_and_reports_them():
    network = build()
    with torch.no_grad():
        network[0].weight_log_sigma2[:, 2:] = 10
    recorder = Recorder()
    fit(network, problem(), (Phase(name="vd", epochs=2, tau1=1.0, compact_every=1),), n_data=256, watcher=recorder)
    assert [s.weights_computed for s in recorder.epochs] == [12 * 16 + 16 + 51, 2 * 16 + 16 + 51]
    assert recorder.epochs[1].zeros >= 160 / 259


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        (Phase(name="p", tau2=0.1), "p: the phase has the term mixture, and the training was given none"),
        (Phase(name="p", distillation=0.5), "p: distillation needs a teacher; give one, or set p.distillation=0"),
    ],
)
def test_what_a_phase_needs_and_has_not(phase, message):
    with pytest.raises(RecipeError, match=message):
        fit(build(), problem(), (phase,), n_data=256, terms=())


def test_priors_need_gaussian_weights():
    with pytest.raises(RecipeError, match="this network has none"):
        fit(build(variational=False), problem(), (Phase(name="p", tau1=1.0),), n_data=256)


def test_no_batches():
    with pytest.raises(DataError, match="gave no batch"):
        fit(build(), [], (Phase(name="p", epochs=1),), n_data=1)
    with pytest.raises(DataError, match="nothing to evaluate on"):
        evaluate(build(), [])
    with pytest.raises(ModelError, match=r"not a str; load\(\) makes one of a file"):
        evaluate("net.bayz", [])
    with pytest.raises(DataError, match="gave no batch"):
        count_examples([])


def test_evaluate_is_the_share_right_at_the_means():
    network = build().train()
    inputs = torch.randn(50, 12)
    right = network.eval()(inputs).argmax(1)
    targets = torch.where(torch.arange(50) < 30, right, (right + 1) % 3)
    network.train()
    assert evaluate(network, [(inputs[:20], targets[:20]), (inputs[20:], targets[20:])]) == pytest.approx(0.6)
    assert network.training


class Stream(IterableDataset):
    def __iter__(self):
        yield from ((torch.zeros(2), 0) for _ in range(13))


def test_count_examples():
    inputs, targets = torch.zeros(13, 2), torch.zeros(13, dtype=torch.long)
    data = TensorDataset(inputs, targets)
    assert count_examples(ResidentBatches(inputs, targets, 4)) == 13
    assert count_examples(DataLoader(data, batch_size=4, shuffle=True)) == 13
    assert count_examples(DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(range(6)))) == 6
    few = BatchSampler(SubsetRandomSampler(range(6)), batch_size=4, drop_last=False)
    assert count_examples(DataLoader(data, batch_sampler=few)) == 6
    assert count_examples(DataLoader(Stream(), batch_size=4)) == 13
    assert count_examples([(inputs[:5], targets[:5]), (inputs[5:], targets[5:])]) == 13


@pytest.mark.parametrize(
    "batch",
    [
        (torch.ones(2, 12), torch.ones(2), torch.ones(2)),
        torch.ones(2, 12),
        ([], torch.ones(2)),
        ([torch.ones(2, 12), 3], torch.ones(2)),
    ],
)
def test_batches_of_another_form(batch):
    for use in (count_examples, lambda batches: evaluate(build(), batches)):
        with pytest.raises(DataError, match="each a tensor or a tuple of tensors"):
            use([batch])


@pytest.mark.parametrize("batch", [{"x": 1}, {"x": torch.ones(2, 12)}, {"labels": torch.ones(2)}], ids=str)
def test_batches_by_name_need_inputs_and_targets(batch):
    with pytest.raises(DataError, match=r"a batch by name needs inputs, and targets under one of labels, .*; it has "):
        count_examples([batch])


ROWS, NUMBER = torch.ones(2, 12), torch.tensor(1.0)


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        ({"x": ROWS, "scale": NUMBER, "labels": ROWS}, "input scale"),
        ({"x": ROWS, "labels": NUMBER}, "target"),
        ((ROWS, NUMBER), "target"),
        (((ROWS, NUMBER), ROWS), "input 2"),
        ((ROWS, {"boxes": ROWS, "count": NUMBER}), "target count"),
        ((NUMBER, ROWS), "input"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_numbers_without_rows_are_named(batch, name):
    with pytest.raises(DataError, match=f"the {name} of a batch is one number, .* repeat the number for each"):
        count_examples([batch])


def test_a_loader_of_a_stream_has_no_length():
    class Stream(IterableDataset):
        def __iter__(self):
            return zip(*next(iter(problem(64, 64))), strict=True)

    recorder = Recorder()
    loader = DataLoader(Stream(), batch_size=16)
    fit(build(), loader, [Phase(epochs=2, tau1=1.0)], n_data=count_examples(loader), watcher=recorder)
    assert len(recorder.epochs) == 2


class Unsized:
    """Gives batches, and does not say how many."""

    def __init__(self, *rows: int) -> None:
        self.rows = rows

    def __iter__(self):
        inputs, targets = next(iter(problem(sum(self.rows), sum(self.rows))))
        return zip(inputs.split(self.rows), targets.split(self.rows), strict=True)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_loader_without_a_length_trains_as_one_with_it(schedule):
    trained = []
    for loader in (Unsized(16, 16, 16, 16), list(Unsized(16, 16, 16, 16))):
        network, recorder = build(), Recorder()
        torch.manual_seed(1)
        phases = [Phase(epochs=1, tau1=1.0, schedule=schedule, rate_theta=1e-2)] * 2
        fit(network, loader, phases, n_data=64, watcher=recorder)
        assert recorder.done == [0, 0.25, 0.5, 0.75] * 2
        assert [stats.steps for stats in recorder.epochs] == [4, 4]
        trained.append(network[0].weight.detach())
    assert torch.equal(*trained)


def test_after_one_pass_it_is_known_how_many_batches_there_are():
    recorder = Recorder()
    phases = [Phase(epochs=2, tau1=1.0), Phase(epochs=1, tau1=1.0)]
    fit(build(), Unsized(8, 24, 16, 16), phases, n_data=64, watcher=recorder)
    # As many as eight are expected at first.
    assert recorder.done == [0, 1 / 16, 2 / 16, 3 / 16, 0.5, 0.625, 0.75, 0.875, 0, 0.25, 0.5, 0.75]


def test_a_loader_may_have_more_batches_in_one_epoch_than_in_another():
    """As one that fills batches up to a number of tokens, whose sampler knows its length when it has shuffled."""

    class Refilled(list):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return super().__iter__() if self.passes % 2 else iter(self[:2])

        def __len__(self):
            return 2 if self.passes % 2 else super().__len__()

    recorder = Recorder()
    loader = Refilled(Unsized(16, 16, 16, 16))
    fit(build(), loader, [Phase(epochs=3, tau1=1.0)], n_data=64, watcher=recorder)
    thirds = [0, 1 / 4, 2 / 4, 3 / 4, 1, 1.5, 2, 2.25, 2.5, 2.75]
    assert recorder.done == pytest.approx([each / 3 for each in thirds])


def test_count_examples_does_not_ask_a_progress_bar_how_far_it_is():
    class Bar:
        n = 0

        def __iter__(self):
            return iter(problem(64, 16))

    assert count_examples(Bar()) == 64


def test_a_network_that_fails_on_the_data_is_named_with_the_phase():
    inputs, targets = next(iter(problem(32, 32)))
    for batch in ((inputs[:, :3], targets), (inputs, targets + 100), (inputs, targets.float())):
        with pytest.raises(TrainingError, match="phase vd, epoch 1 of 1: the network or its loss fails"):
            fit(build(), [batch], [Phase(name="vd", tau1=1.0)], n_data=32)
    with pytest.raises(TrainingError, match="evaluation"):
        evaluate(build(), [(inputs[:, :3], targets)])
    narrow = ResidentBatches(inputs[:, :3], targets, 8, shuffle=True)
    with pytest.raises(TrainingError, match="distillation"):
        fit(build(), narrow, [Phase(distillation=0.5)], n_data=32, teacher=build(variational=False))


def test_what_the_optimizer_can_not_do_is_named_too():
    network = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten())
    with pytest.raises(TrainingError, match="sparse"):
        fit(network, [(torch.zeros(4, 1, dtype=torch.long), torch.zeros(4, dtype=torch.long))], [Phase()], n_data=4)


def test_distillation_of_outputs_in_sequences_is_that_of_their_rows():
    losses = []
    for shape in ((12, 12), (4, 3, 12)):
        torch.manual_seed(1)
        inputs, targets = torch.randn(12, 12).view(shape), torch.zeros(12, dtype=torch.long)
        recorder = Recorder()
        fit(
            build(variational=False),
            [(inputs, targets)],
            [Phase(noise=False, distillation=1.0)],
            n_data=12,
            teacher=build(seed=3, variational=False),
            loss=lambda outputs, targets: F.cross_entropy(outputs.flatten(0, -2), targets),
            watcher=recorder,
        )
        losses.append(recorder.epochs[0].parts["data"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_accuracy_of_images_of_classes_and_of_what_has_no_classes():
    images, classes = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    network = nn.Conv2d(3, 3, 1, bias=False)
    with torch.no_grad():
        network.weight.copy_(torch.eye(3).view(3, 3, 1, 1))
    assert evaluate(network, [(images, classes)]) == pytest.approx((images.argmax(1) == classes).double().mean().item())
    with pytest.raises(DataError, match="accuracy needs a class for each target"):
        evaluate(nn.Linear(12, 1), [(torch.randn(6, 12), torch.randn(6, 1))])


def test_distillation_of_images_runs_over_their_classes():
    inputs, targets = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    torch.manual_seed(0)
    network, teacher, recorder = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), Recorder()
    ours, theirs = (net(inputs).detach() / 2 for net in (network, teacher))
    expected = -(theirs.softmax(1) * ours.log_softmax(1)).sum(1).mean() * 4
    fit(network, [(inputs, targets)], [Phase(distillation=1.0)], n_data=2, teacher=teacher, watcher=recorder)
    assert recorder.epochs[0].parts["data"] == pytest.approx(expected.item(), rel=1e-5)


class TwoInTwoOut(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(4, 3), torch.nn.Linear(5, 3)

    def forward(self, left, right):
        both = self.left(left) + self.right(right)
        return both, both.sum(dim=1)


def test_several_inputs_targets_and_outputs():
    torch.manual_seed(0)
    network = TwoInTwoOut()
    left, right = torch.randn(64, 4), torch.randn(64, 5)
    classes = left[:, :3].argmax(dim=1)

    def loss(outputs, targets):
        return torch.nn.functional.cross_entropy(outputs[0], targets[0]) + outputs[1].sub(targets[1]).square().mean()

    batches = [((left, right), (classes, torch.zeros(64)))]
    recorder = Recorder()
    fit(network, batches, [Phase("l2", epochs=30, rate_theta=1e-2)], n_data=64, loss=loss, watcher=recorder)
    assert recorder.epochs[-1].parts["data"] < 0.7 * recorder.epochs[0].parts["data"]
    assert count_examples(batches) == 64
    with pytest.raises(DataError, match="2 tensors"):
        evaluate(network, batches)
