"""A fitting taken up anywhere ends, bit for bit, where it would have ended: steps, epochs, phases, compacted or not."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

from bayeszip.errors import CheckpointError, DataError
from bayeszip.fitting import EpochStats, Fitting, Phase, ResidentBatches, Watcher
from bayeszip.fitting import loop as fitting_loop
from bayeszip.fitting.checkpoint import read_checkpoint, write_checkpoint
from bayeszip.fitting.shares import ResidentShare
from bayeszip.fitting.state import (
    Passes,
    load_module_state,
    load_random_state,
    module_state,
    random_state,
    snapshot,
)
from bayeszip.variational import Divergence, MixturePrior, to_variational

PHASES = (
    Phase(name="plain", epochs=1, noise=False, rate_theta=1e-3),
    Phase(name="vd", epochs=3, tau1=1.0, rate_theta=1e-3, rate_log_sigma2=0.2, compact_every=1, distillation=0.5),
    Phase(name="sws", epochs=2, tau1=1.0, tau2=0.1, rate_theta=1e-3, schedule="cosine", reseed=True, std_first=0.05,
          std_last=0.01, compact_every=1),
)  # fmt: skip
N = 60


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(N, 12, generator=generator)
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


class Recorder(Watcher):
    def __init__(self) -> None:
        self.epochs: list[EpochStats] = []
        self.compacted = False

    def on_epoch(self, stats: EpochStats, course) -> None:
        self.epochs.append(stats)
        self.compacted |= stats.weights_computed < 12 * 16 + 16 * 3 + 19


def build(batches) -> Fitting:
    torch.manual_seed(0)
    random.seed(0)
    first, last = nn.Linear(12, 16), nn.Linear(16, 3)
    network = nn.Sequential(first, nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), last)
    teacher = copy.deepcopy(network).eval()
    with torch.no_grad():  # so that there is something to leave out
        first.weight[:, 6:] = 0
        last.weight[:, ::2] = 0
    to_variational(network, log_sigma2=-7.0)
    return Fitting(
        network, batches, PHASES, n_data=N, terms=(Divergence(), MixturePrior(5, 0.2)), teacher=teacher,
        watcher=Recorder(), validation=[tensors()],
    )  # fmt: skip


def resident() -> ResidentBatches:
    return ResidentBatches(*tensors(), 16, shuffle=True, seed=3)


class Noisy(Dataset):
    """Draws from every source of random numbers there is."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = tensors()
        scale = torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002
        return inputs[index] * scale.float(), targets[index]


class Stream:
    """Batches whose number nobody knows, and which the first one misleads about."""

    def __iter__(self):
        inputs, targets = tensors()
        return zip(inputs.split([12, 18, 6, 24]), targets.split([12, 18, 6, 24]), strict=True)


class Refilled(Stream):
    """Fills batches up, so that its length is another each time that it is shuffled, and never quite what it gives."""

    def __len__(self) -> int:
        return 3 + int(torch.get_rng_state().sum()) % 5


LOADERS = {
    "resident": resident,
    "in order": lambda: ResidentBatches(*tensors(), 16),
    "list": lambda: list(ResidentBatches(*tensors(), 16)),
    "DataLoader, torch's random numbers": lambda: DataLoader(TensorDataset(*tensors()), 16, shuffle=True),
    "DataLoader, its own": lambda: DataLoader(
        TensorDataset(*tensors()), 16, shuffle=True, generator=torch.Generator().manual_seed(2)
    ),
    "DataLoader, a batch sampler": lambda: DataLoader(
        TensorDataset(*tensors()),
        batch_sampler=BatchSampler(
            RandomSampler(range(N), generator=torch.Generator().manual_seed(2)), batch_size=16, drop_last=False
        ),
    ),
    "stream": Stream,
    "of changing length": Refilled,
    "DataLoader, noisy data": lambda: DataLoader(Noisy(), 16, shuffle=True),
}


def ending(run: Fitting) -> dict:
    """All there is at the end, as one dictionary of tensors."""
    found = {**module_state(run.network)["tensors"], **module_state(run.problem.terms[1])["tensors"]}
    found["random"] = torch.get_rng_state()
    return found


def figures(run: Fitting) -> list[tuple]:
    assert isinstance(run.watcher, Recorder)
    return [tuple(value for name, value in vars(stats).items() if name != "seconds") for stats in run.watcher.epochs]


@pytest.fixture(scope="module", params=LOADERS)
def whole(request):
    """An uninterrupted run, with the state at each of its moments."""
    loader, states = LOADERS[request.param], []

    np.random.seed(0)  # noqa: NPY002
    run = build(loader())
    run.at_rest = lambda moment: states.append((moment, copy.deepcopy(run.state_dict())))
    run.run()
    assert run.watcher.compacted
    return loader, states, ending(run), figures(run)


def test_every_step_epoch_and_phase_is_a_moment(whole):
    _, states, _, _ = whole
    one_epoch = ["step"] * 4 + ["epoch"]
    assert [moment for moment, _ in states] == [*one_epoch, "phase", *one_epoch * 3, "phase", *one_epoch * 2, "phase"]


def test_taken_up_anywhere_it_ends_the_same(whole):
    loader, states, expected, history = whole
    for index, (_, state) in enumerate(states):
        run = build(loader())
        torch.manual_seed(77 + index)
        random.seed(index)
        run.load_state_dict(state)
        run.run()
        found = ending(run)
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected), (index, state["epoch"])
        assert figures(run) == history[len(history) - len(run.watcher.epochs) :]


def test_also_from_a_file(whole, tmp_path):
    loader, states, expected, _ = whole
    for _, state in states[7::9]:
        write_checkpoint(tmp_path / "c", state, {})
        run = build(loader())
        run.load_state_dict(read_checkpoint(tmp_path / "c").state)
        run.run()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in ending(run).items())


def test_a_state_without_random_numbers_would_not_do(whole):
    """The comparison above can fail."""
    loader, states, expected, _ = whole
    state = states[9][1]
    run = build(loader())
    run.load_state_dict(state)
    torch.manual_seed(5)
    run.run()
    assert not torch.equal(run.network[0].weight, expected["0.weight"])


def test_workers_give_the_same_batches_again():
    loader = DataLoader(Noisy(), 16, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(1))
    passes = Passes(loader)
    given = passes.rest(0)
    first = [next(given) for _ in range(2)]
    state = copy.deepcopy({"passes": passes.state_dict()})
    rest = list(given)
    again = Passes(DataLoader(Noisy(), 16, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(9)))
    again.load_state_dict(state["passes"])
    repeated = list(again.rest(2))
    assert len(first) + len(rest) == 4
    for ours, theirs in zip(rest, repeated, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("loader", LOADERS)
def test_a_pass_that_somebody_left_does_not_count(loader):
    batches = LOADERS[loader]()
    next(iter(batches))
    torch.manual_seed(3)
    passes = Passes(batches)
    state = copy.deepcopy({"passes": passes.state_dict(), "random": random_state(*passes.generators)})
    given = list(passes.rest(0))
    passes.load_state_dict(state["passes"])
    load_random_state(state["random"], *passes.generators)
    again = list(passes.rest(0))
    assert len(given) == len(again) == 4
    for ours, theirs in zip(given, again, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_a_loader_that_became_shorter_is_named():
    passes = Passes([1, 2, 3])
    iterator = passes.rest(0)
    next(iterator)
    shorter = Passes([1])
    shorter.load_state_dict(passes.state_dict())
    with pytest.raises(DataError, match="the loader ends after 1 batches, but gave 2 before"):
        next(shorter.rest(2))


def test_a_snapshot_is_a_copy_in_the_memory_of_the_one_before():
    state = {"a": torch.arange(3), "b": [torch.ones(2), {"c": torch.zeros(())}], "d": (1, "x"), "e": None}
    first = snapshot(state)
    state["a"] += 1
    state["b"][1]["c"] += 5
    assert first["a"].tolist() == [0, 1, 2]
    assert first["b"][1]["c"] == 0
    assert first["d"] == (1, "x")
    memory = first["a"].data_ptr()
    second = snapshot({**state, "b": [torch.ones(3)], "f": torch.zeros(1)}, first)
    assert second["a"].tolist() == [1, 2, 3]
    assert second["a"].data_ptr() == memory
    assert second["b"][0].tolist() == [1, 1, 1]
    assert second["f"].tolist() == [0]


def test_another_network_is_refused_by_name():
    state = module_state(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(CheckpointError, match=r"only the checkpoint has a tensor 1\.weight"):
        load_module_state(nn.Sequential(nn.Linear(2, 2)), state)
    with pytest.raises(CheckpointError, match=r"only the network has a tensor 2\.weight"):
        load_module_state(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)), state)


def test_buffers_that_no_state_dict_holds_are_held():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()), persistent=False)

    module, other = Counting(), Counting()
    module.seen += 3
    load_module_state(other, module_state(module))
    assert other.seen == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("recorded", [True, False])
def test_on_a_gpu_it_ends_at_the_same_place_too(monkeypatch, tmp_path, recorded):
    """Sums on a GPU may differ in their last bits, so this is close and not equal; without the state it is far off."""
    monkeypatch.setattr(fitting_loop, "STEPS_A_LOOK", 2)
    if not recorded:
        monkeypatch.setattr(fitting_loop, "can_be_recorded", lambda batches, device: False)
    inputs, targets = tensors()

    def build_one() -> Fitting:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3)).cuda()
        to_variational(network)
        batches = ResidentBatches(inputs.cuda(), targets.cuda(), 6, shuffle=True, seed=1)
        phase = Phase(name="vd", epochs=3, tau1=1.0, rate_theta=1e-2, compact_every=1)
        return Fitting(network, batches, (phase,), n_data=N)

    whole = build_one()
    files = []

    def keep(moment: str) -> None:
        files.append(tmp_path / str(len(files)))
        write_checkpoint(files[-1], whole.state_dict(), {})

    whole.at_rest = keep
    whole.run()
    assert len(files) > 5
    for file in files:
        run = build_one()
        torch.manual_seed(7)
        run.load_state_dict(read_checkpoint(file).state)
        run.run()
        for ours, theirs in zip(run.network.parameters(), whole.network.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("phase", "epoch"), [(1, 4), (4, 0)])
def test_phases_that_became_shorter_are_noticed(phase, epoch):
    run = build(resident())
    with pytest.raises(CheckpointError, match="further on than these phases go"):
        run.load_state_dict({**run.state_dict(), "phase": phase, "epoch": epoch})


def test_channels_last_weights_keep_their_layout():
    def build_one() -> Fitting:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2))
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub leaves it out
        inputs = torch.randn(24, 3, 6, 6).to(memory_format=torch.channels_last)
        batches = ResidentBatches(inputs, torch.arange(24) % 2, 8, shuffle=True)
        phase = Phase(name="p", epochs=2, noise=False, rate_theta=1e-2)
        return Fitting(network, batches, (phase,), n_data=24)

    states = []
    whole = build_one()
    whole.at_rest = lambda moment: states.append(copy.deepcopy(whole.state_dict()))
    whole.run()
    for state in states[:-1]:
        # As a file gives it back.
        held = [{name: value.contiguous() for name, value in entry.items()} for entry in state["optimizer"]]
        run = build_one()
        run.load_state_dict({**state, "optimizer": held})
        run.run()
        assert all(map(torch.equal, run.network.parameters(), whole.network.parameters()))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_pass_that_was_begun_and_left_is_not_the_one_that_is_saved(processes):
    """Whoever looks at the first batch of a loader begins a pass of it."""
    resident = ResidentBatches(*tensors(), 16, shuffle=True)
    next(iter(resident))
    batches = resident if processes == 1 else ResidentShare(resident, 0, processes)
    passes = Passes(batches)
    state = passes.state_dict()
    first = [batch.targets for batch in passes.rest(0)]
    passes.load_state_dict(state)
    again = [batch.targets for batch in passes.rest(0)]
    assert len(first) == len(again) == 4
    assert all(map(torch.equal, first, again))
