"""Trainings that test_distributed.py runs alone and in two processes; what comes of each goes into a file a rank."""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayeszip
from bayeszip.errors import BayeszipError
from bayeszip.fitting import Phase, ResidentBatches, Steering, Watcher, fit
from bayeszip.fitting.launch import leave, make_engine
from bayeszip.recipe import recipe
from bayeszip.variational import Divergence, MixturePrior, to_variational

#: No multiple of the batch size, and the last batch of a pass has a single example: too few for two processes.
EXAMPLES, BATCH = 181, 20

CPU = torch.device("cpu")


def data():
    source = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES, 6, generator=source)
    return x, (x[:, 0] + x[:, 1] > 0).long()


def network(*middle):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), *middle, nn.ReLU(), nn.Linear(16, 2))


PARTS = ("data", "divergence", "mixture", "hyper-prior")


class Keeping(Watcher):
    def __init__(self):
        self.stats = []

    def on_epoch(self, stats, course):
        self.stats.append(stats)

    def on_warning(self, message):
        assert "going back to the start of the epoch" in message


class Strength(Steering):
    def __init__(self, strength):
        self._strength = strength

    def strength(self):
        return self._strength


def phases(noise, schedule):
    rates = {"schedule": schedule, "rate_theta": 1e-2, "rate_log_sigma2": 1e-1}
    common = {"noise": noise, "tau1": 1.0 if noise else 0.0, **rates}
    sharing = Phase(name="sharing", epochs=3, tau2=0.05, reseed=True, compact_every=1, **common)
    return [Phase(name="first", epochs=2, **common), sharing]


def fitted(batches, *, noise=False, middle=(), accumulate=1, mixed_precision="no", strength=1.0, schedule="constant"):
    """Tensors of the network and the mixture after two phases, and the history."""
    net = network(*middle)
    to_variational(net, log_sigma2=-6.0 if noise else -10.0, biases=True)
    prior, watcher = MixturePrior(5, 0.3), Keeping()
    x, y = data()
    torch.manual_seed(1)
    fit(
        net,
        batches,
        phases(noise, schedule),
        n_data=EXAMPLES,
        terms=(Divergence(), prior),
        validation=ResidentBatches(x, y, 50),
        watcher=watcher,
        steering=Strength(strength),
        engine=make_engine(CPU, accumulate=accumulate, mixed_precision=mixed_precision, seed=5),
    )
    history = [[*(s.parts.get(name, 0.0) for name in PARTS), s.accuracy, s.zeros] for s in watcher.stats]
    tensors = {**net.state_dict(), **{f"prior.{name}": value for name, value in prior.state_dict().items()}}
    return {
        **{name: value.double().contiguous() for name, value in tensors.items()},
        "history": torch.tensor(history, dtype=torch.float64),
        "draw": torch.rand(1),
    }


def resident(examples=EXAMPLES, **options):
    x, y = data()
    return fitted(ResidentBatches(x[:examples], y[:examples], BATCH, shuffle=True, seed=3), **options)


def loaded(**options):
    x, y = data()
    # No remainder: accelerate fills it up from the first batch.
    return fitted(DataLoader(TensorDataset(x[:180], y[:180]), batch_size=BATCH), **options)


def listed(**options):
    x, y = data()
    return fitted(list(zip(x.split(BATCH), y.split(BATCH), strict=True)), **options)


class Stream:
    """Has no length; its first batch has other shares for two processes than it has rows, and than the others have."""

    def __iter__(self):
        x, y = data()
        yield x[:5], y[:5]
        yield from zip(x[5:].split(BATCH), y[5:].split(BATCH), strict=True)


def compressed():
    x, y = data()
    brief = recipe("quick").override("epochs_scale=0.05", "all.tau1=0.1")
    batches = ResidentBatches(x, y, BATCH, shuffle=True, seed=0)
    result = bayeszip.compress(network(), batches, val_loader=ResidentBatches(x, y, 50), recipe=brief, device="cpu")
    sizes = [stats.bytes or 0 for stats in result.fit.history]
    return {"blob": torch.tensor(list(result.blob)), "sizes": torch.tensor(sizes)}


class Stop(BaseException):
    """Ends a training from outside, in all processes at the same batch."""


def resumed(folder):
    """A compression that ends in the middle and is taken up; counts the batches of both."""
    x, y = data()
    counts, stop_at = [0, 0], 45
    loss_of = nn.CrossEntropyLoss()

    def loss(outputs, targets):
        counts[1] += torch.is_grad_enabled()  # one process alone judges
        if counts[1] == stop_at and not counts[0]:
            raise Stop
        return loss_of(outputs, targets)

    def compress():
        batches = ResidentBatches(x[:180], y[:180], BATCH, shuffle=True, seed=0)
        keeping = bayeszip.Checkpointing(folder / "checkpoints", every="1epochs")
        brief = recipe("quick").override("epochs_scale=0.05", "all.tau1=0.1")
        return bayeszip.compress(
            network(),
            batches,
            recipe=brief,
            device="cpu",
            loss=loss,
            checkpoints=keeping,
            resume=True,
            watcher=Watcher(),
        )

    try:
        compress()
    except Stop:
        counts[:] = [counts[1], 0]
    result = compress()
    return {
        "blob": torch.tensor(list(result.blob)),
        "epochs": torch.tensor(len(result.fit.history)),
        "batches": torch.tensor(9 * len(result.fit.history)),
        "batches again": torch.tensor(counts[1]),
    }


SCENARIOS = {
    "resident": resident,
    "loader": loaded,
    "list": listed,
    "stream": lambda: fitted(Stream(), schedule="linear"),
    "accumulated": lambda: resident(accumulate=3),
    "noise": lambda: resident(noise=True),
    "strength": lambda: resident(noise=True, strength=1.0 if os.environ.get("RANK", "0") == "0" else 50.0),
    # Normalization over a single example is refused.
    "statistics": lambda: resident(EXAMPLES - 1, noise=True, middle=(nn.BatchNorm1d(16),)),
    "bf16": lambda: resident(mixed_precision="bf16"),
    "compress": compressed,
}


def diverging(rank):
    engine = make_engine(CPU)
    engine.check_alike({"same": torch.ones(3)}, "here")
    engine.check_alike({"same": torch.ones(3), "odd": torch.ones(3) + 1e-6 * rank}, "at the end of an epoch")


def other_batches(rank):
    x, y = data()
    fitted(list(zip(x.roll(rank, 0).split(BATCH), y.roll(rank, 0).split(BATCH), strict=True)))


def odd_batches(rank):
    x, y = data()
    fitted(DataLoader(TensorDataset(x, y), batch_size=7))


def poisoned(rank):
    x, y = data()
    # In the share of the second process alone.
    x[BATCH - 1] = float("nan")
    fitted(list(zip(x.split(BATCH), y.split(BATCH), strict=True)))


def lost(rank):
    class Ending(list):
        def __iter__(self):
            for index, batch in enumerate(list.__iter__(self)):
                if index == 3 and rank == 1:
                    raise bayeszip.errors.DataError("the disk of this one is gone")
                yield batch

    x, y = data()
    fitted(Ending(zip(x.split(BATCH), y.split(BATCH), strict=True)))


FAILURES = {
    "diverging": diverging,
    "other_batches": other_batches,
    "odd_batches": odd_batches,
    "poisoned": poisoned,
    "lost": lost,
}


def main():
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    for name, scenario in SCENARIOS.items():
        save_file(scenario(), folder / f"{name}-{rank}.safetensors")
    save_file(resumed(folder), folder / f"resumed-{rank}.safetensors")
    said = {}
    for name, failure in FAILURES.items():
        try:
            failure(rank)
        except BayeszipError as error:
            said[name] = f"{type(error).__name__}: {error}"
        (folder / f"said-{rank}.json").write_text(json.dumps(said))
        if name == "lost":
            # Alone of all, the process that failed is gone at once; the other must notice.
            os._exit(1)
    leave()


if __name__ == "__main__":
    main()
