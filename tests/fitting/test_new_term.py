"""A new prior in one file: this one. Nothing of the package knows it, and it trains, is shown by name, and resumes."""

import io
import json
from dataclasses import dataclass

import pytest
import torch
from rich.console import Console
from torch import nn

import bayeszip
from bayeszip.compressor import Compressor
from bayeszip.errors import RecipeError
from bayeszip.fitting import Phase, ResidentBatches, Watcher
from bayeszip.fitting.keeper import Checkpointing
from bayeszip.progress import TrainingProgress
from bayeszip.recipe import Recipe, recipe
from bayeszip.record import write_record
from bayeszip.report import gather, page
from bayeszip.schedules import ramp
from bayeszip.settings import at_least, between, check, setting
from bayeszip.variational import Term
from bayeszip.variational.terms import KINDS


@dataclass(frozen=True)
class UnitNormSettings:
    """What a phase says of it."""

    weight: float = setting(0.0, "weight of the penalty", at_least(0))
    ramp: float = setting(0.0, "share of the phase over which it rises from 0", between(0, 1))
    rate_log_scale: float = setting(1e-2, "learning rate of the scale", at_least(0))

    def __post_init__(self):
        check(self, "unit-norms")


class UnitNorms(Term):
    """Σ over units of s·‖w_unit‖ − log s, with a scale s that is learnt: an ℓ₁ penalty on the norms of groups."""

    name = "unit-norms"
    Settings = UnitNormSettings

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    @classmethod
    def counts(cls, settings):
        return settings.weight > 0

    def dials(self, settings, done):
        return (settings.weight * ramp(done, settings.ramp),)

    def cost(self, weights, tau):
        norms = [weight.theta.flatten(1).norm(dim=1) for weight in weights if weight.theta.dim() > 1]
        return (tau * torch.cat([norm * self.log_scale.exp() - self.log_scale for norm in norms]).sum(),)

    def frozen(self):
        return float(self.log_scale.detach())


@pytest.fixture(autouse=True)
def only_here():
    """The term is known to the tests of this file alone."""
    KINDS[UnitNorms.name] = UnitNorms
    yield
    KINDS.pop(UnitNorms.name)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))


def batches():
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    return ResidentBatches(inputs, (inputs[:, 0] > 0).long(), 16, shuffle=True, seed=2)


def settings(weight=3.0):
    quick = recipe("quick").override("epochs_scale=0.05", "all.distillation=0", "all.tau1_ramp=0")
    return quick.override(f"all.unit-norms.weight={weight}") if weight else quick


def compressed(chosen, **options):
    return bayeszip.compress(
        network(), batches(), recipe=chosen, device="cpu", **{"watcher": Watcher(), "val_loader": batches(), **options}
    )


def test_it_is_set_like_any_other_setting_and_travels_as_json():
    chosen = settings(0.5).override("vd.unit-norms.ramp=0.5")
    assert chosen.phases[0].terms == {"unit-norms": UnitNormSettings(0.5, 0.5)}
    assert Recipe.from_json(chosen.to_json()) == chosen
    with pytest.raises(RecipeError, match=r"unit-norms.weight must be at least 0, not -1"):
        settings().override("vd.unit-norms.weight=-1")
    with pytest.raises(RecipeError, match="no setting size"):
        settings().override("vd.unit-norms.size=1")
    with pytest.raises(
        RecipeError, match="there is no term 'unit-normals'; known: divergence, groups, mixture, rate, unit-norms"
    ):
        settings().override("vd.unit-normals.weight=1")
    with pytest.raises(RecipeError, match="the settings of mixture are the phase's own"):
        Phase(name="p", terms={"mixture": {}})


def test_it_trains_and_shrinks_what_it_penalizes():
    with_it, without = compressed(settings(300.0)), compressed(settings(0))
    norms = [sum(float(p.detach().norm()) for p in r.network().parameters()) for r in (with_it, without)]
    assert norms[0] < 0.98 * norms[1]
    parts = [stats.parts for stats in with_it.fit.history if stats.phase in ("vd", "vd+sws")]
    assert all(part["unit-norms"] != 0 for part in parts)
    assert list(parts[-1]) == ["data", "divergence", "mixture", "hyper-prior", "unit-norms"]
    assert "unit-norms" not in without.fit.history[0].parts


def test_progress_record_and_report_name_it(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    chosen = settings()
    with TrainingProgress(chosen.scaled().sequence(pretrain=False), console) as display:
        result = compressed(chosen, watcher=display)
    assert "unit-norms" in console.file.getvalue()
    figures = {"accuracy": 1.0, "bytes": result.bytes, "ratio": result.ratio, "params": 1, "nonzero": 1}
    write_record(tmp_path / "run", result, figures)
    record = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert record["history"][0]["parts"]["unit-norms"] > 0
    assert record["recipe"]["phases"][0]["terms"] == {
        "unit-norms": {"weight": 3.0, "ramp": 0.0, "rate_log_scale": 0.01}
    }
    result.save(tmp_path / "net.bayz")
    assert "unit-norms" in str(page(gather(tmp_path / "net.bayz", tmp_path / "run")))


class Stopping(Watcher):
    """Ends a run in the middle, as a signal would."""

    def __init__(self, after):
        self.after = after

    def on_batch(self, phase, done):
        self.after -= 1
        if not self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [3, 26, 33])
def test_it_resumes_bit_for_bit(tmp_path, after):
    chosen, kept = settings(), Checkpointing(tmp_path / "checkpoints", every="1steps")
    expected = compressed(chosen)
    with pytest.raises(KeyboardInterrupt):
        compressed(chosen, checkpoints=kept, watcher=Stopping(after))
    resumed = compressed(chosen, checkpoints=kept, resume=True)
    assert resumed.blob == expected.blob
    untimed = [[{**vars(stats), "seconds": 0, "bytes": 0} for stats in run.fit.history] for run in (resumed, expected)]
    assert untimed[0] == untimed[1]


def test_a_loop_of_ones_own_has_it_too():
    model = network()
    compressor = Compressor(model, settings(), n_data=96, batch_size=16)
    optimizer = torch.optim.Adam(compressor.parameter_groups())
    compressor.set_rates_of(optimizer)
    loader = batches()
    for _ in range(compressor.total_steps // len(loader)):
        for x, y in loader:
            optimizer.zero_grad()
            (nn.functional.cross_entropy(model(x), y) + compressor.regularizer()).backward()
            optimizer.step()
            assert set(compressor.stats().taus) >= {"divergence", "unit-norms"}
            compressor.step()
    term = next(term for term in compressor.terms if term.name == "unit-norms")
    assert term.log_scale.item() != 0
    assert compressor.finalize(example_inputs=(torch.zeros(2, 6),)).bytes > 0
