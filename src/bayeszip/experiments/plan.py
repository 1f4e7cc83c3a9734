"""Experiments as settings: which networks, recipes, `--set` assignments and seeds. What trains them is `runner`.

>>> [run.name for run in EXPERIMENTS["table"].runs(only="lenet-5-vd+sws")][:2]
['lenet-5-vd+sws-10', 'lenet-5-vd+sws-11']
"""

from dataclasses import replace

from bayeszip.experiments.curves import CURVES, variant_of
from bayeszip.experiments.parts import part_variants
from bayeszip.experiments.runs import Experiment, Variant

__all__ = ["EXPERIMENTS", "METHODS"]

MODELS = ("lenet-300-100", "lenet-5")
METHODS = ("l2", "sws", "vd", "vd+sws", "paper-sws", "paper-vd", "paper-vd+sws")

_TABLE = tuple(Variant(f"{model}-{method}", model, method) for model in MODELS for method in METHODS)

#: What the figure and the choice vary settings of: the recipes before anything was chosen.
_FROM = {
    "vd+sws": "all.tau1=1 mixture.components=17",
    "vd": "all.tau1=1",
    "sws": "all.std_first=0 all.std_last=0 mixture.components=17",
}
#: Mostly by the dense network, whose outputs are softened more.
_TAUGHT = "all.distillation=0.9 all.distillation_temperature=4 closing.distillation=0.9"
#: Which these runs were trained with, when `all` did not reach the closing phase yet.
_TAUGHT += " closing.distillation_temperature=2"
#: Runs as names, settings and what stands for {} in both; several values of one run are joined by a slash.
Family = tuple[str, str, str]

_WIDTHS: Family = (
    "std={}-{}-K={}",
    "all.std_first={} all.std_last={} mixture.components={}",
    "0.015/0.004/17 0.02/0.004/17 0.02/0.002/17 0.03/0.003/17 0.015/0.004/33 0.02/0.004/33 0.02/0.002/33 0.03/0.003/33",
)
_STRENGTHS: Family = ("tau1={}", "all.tau1={}", "0.1 0.25 0.5 1 2 4 8")
_SIZES = "0.3/0.001/17 0.3/0.001/33 0.3/0.0005/17 0.3/0.0005/33 0.5/0.001/17 0.5/0.001/33 0.5/0.0005/17 0.5/0.0005/33 "
_SIZES += "0.7/0.001/17 0.7/0.001/33 0.7/0.0005/17 0.7/0.0005/33 1/0.001/17 1/0.001/33 1/0.0005/17 1/0.0005/33"
_AT_SIZE = "all.tau1={} vd.rate_log_sigma2={} mixture.components={}"
_CHOSEN = "all.tau1=0.7 mixture.components=33"


def _varied(model: str, method: str, more: str, *families: Family) -> tuple[Variant, ...]:
    """A variant for each run of the families; `meaning` has the settings that vary."""
    named = [
        (name.format(*values.split("/")), settings.format(*values.split("/")))
        for name, settings, many in families
        for values in many.split() or [""]
    ]
    return tuple(
        Variant(f"{method}-{name}", model, method, f"{_FROM[method]} {more} {settings}", meaning=settings)
        for name, settings in named
    )


_FIGURE = (
    *_varied(
        *("lenet-5", "vd+sws", "vd.epochs=60 vd+sws.epochs=24 closing.epochs=6"),
        _STRENGTHS,
        ("tau1={}-K=33", "all.tau1={} mixture.components=33", "0.5 1 2"),
        ("tau1={}-slower", "all.tau1={} vd.rate_log_sigma2=5e-4", "1 2"),
        ("tau1=1-K=9", "all.tau1=1 mixture.components=9", ""),
        ("tau1=1-slower-means", "all.tau1=1 vd.rate_theta=2e-3", ""),
        ("tau1={}-taught", f"all.tau1={{}} {_TAUGHT}", "1 2"),
    ),
    *_varied(
        *("lenet-5", "vd", "vd.epochs=60 closing.epochs=6"),
        _STRENGTHS,
        ("tau1={}-values={}", "all.tau1={} quantization.components={}", "0.5/64 1/64 2/64 1/16 2/16 4/16"),
    ),
    *_varied(
        *("lenet-5", "sws", "sws.epochs=60 closing.epochs=6"),
        ("tau2={}", "all.tau2={}", "0.003 0.01 0.03 0.06 0.1 0.3"),
        (
            "tau2={}-pi0={}",
            "all.tau2={} mixture.zero_proportion={}",
            "0.03/0.99 0.03/0.9999 0.1/0.99 0.1/0.9999",
        ),
        ("tau2={}-faster", "all.tau2={} all.rate_theta=2e-3 all.rate_means=2e-3", "0.03 0.1"),
        _WIDTHS,
    ),
)
_CHOICE = (
    *_varied(
        *("lenet-300-100", "vd+sws", ""),
        ("tau1={}-rate={}-K={}", _AT_SIZE, _SIZES),
        ("tau1={}-rate={}-K={}-taught", f"{_AT_SIZE} {_TAUGHT}", _SIZES),
        ("{}", f"{_CHOSEN} vd+sws.{{}}", "std_last=0.003 std_last=0.0015 tau1=0.35 tau2=0.05"),
        ("closing=30", f"{_CHOSEN} closing.epochs=30", ""),
    ),
    *_varied(
        *("lenet-300-100", "sws", ""),
        ("tau2={}", "all.tau2={}", "0.01 0.02 0.03 0.05"),
        ("tau2={}-taught", f"all.tau2={{}} {_TAUGHT}", "0.02 0.03"),
        ("tau2={}-faster", "all.tau2={} all.rate_theta=1e-3 all.rate_means=1e-3", "0.02 0.03"),
        _WIDTHS,
    ),
)

#: For each part: the recipe, what is changed in it, and what that means.
_PARTS = {
    "nothing": ("vd+sws", "", "nothing"),
    "distillation": ("vd+sws", "all.distillation=0 closing.distillation=0", "distillation from the dense network"),
    "ramp": ("vd+sws", "vd.tau1_ramp=0", "the ramp of τ₁"),
    "rates": (
        "vd+sws",
        "vd.rate_theta=5e-5 vd.rate_log_sigma2=1e-4 vd.schedule=constant",
        "our rates in the first phase: the paper's instead",
    ),
    "reseed": ("vd+sws", "vd+sws.reseed=false", "re-seeding of components"),
    "tightening": ("vd+sws", "vd+sws.std_last=0.01", "tightening of components"),
    "pruning": ("vd+sws", "quantization.prune_rate=1", "pruning by dropout rate: by the mixture alone"),
    "values": ("vd+sws", "closing.epochs=0", "training of shared values"),
    "sharing": ("vd", "", "soft weight sharing: 32 values fitted to what the first phase leaves, the recipe `vd`"),
}
_ABLATION = tuple(
    Variant(f"without-{part}", "lenet-300-100", name, settings, meaning=meaning)
    for part, (name, settings, meaning) in _PARTS.items()
)
_QUICK = tuple(Variant(f"tau1={tau1}", "lenet-300-100", "quick", f"all.tau1={tau1}") for tau1 in ("0.5", "1", "2"))
_RESNET_20 = variant_of(
    "resnet-20", "resnet-20", "epochs_scale=0.3 quantization.together=false", augmented=True, meaning="", seeds=(0,)
)
_TARGETS = (
    *(Variant(f"{size}kB", "lenet-300-100", "quick", "", 1000 * size) for size in (3, 6, 12)),
    replace(_RESNET_20, name="resnet-20-25kB", max_bytes=25_000),
    replace(_RESNET_20, name="resnet-20-drop=1", max_accuracy_drop=1.0),
)

_FRONTIER = tuple(variant for curve in CURVES for variant in curve.variants())

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment("table", "the paper's table: two networks, four methods", _TABLE, tuple(range(10, 15))),
        Experiment("figure", "the paper's figure: LeNet-5 as settings vary", _FIGURE, (0,)),
        Experiment("ablation", "what each part of vd+sws is for, on LeNet-300-100", _ABLATION, tuple(range(5))),
        Experiment("choice", "which settings, on LeNet-300-100; the test set is sealed", _CHOICE, (0, 1), sealed=True),
        Experiment("quick", "LeNet-300-100 by the recipe quick", _QUICK, (0, 1, 2)),
        Experiment("targets", "LeNet-300-100 and ResNet-20 towards targets", _TARGETS, (0,)),
        Experiment("parts", "what goes beyond the paper, part by part, at two strengths", part_variants(), (0, 1)),
        Experiment("frontier", "accuracy against bytes: LeNets, and networks for CIFAR-10", _FRONTIER, (10,)),
    )
}
