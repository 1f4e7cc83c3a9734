"""What is wrong, or may be, with a compressed network: one function a finding, each None or a sentence with a remedy.

What they find stands in the last lines of the report, in the record and in the log: a small file of a network that no
longer works must not look like a success.
"""

import math
from collections.abc import Callable, Sequence

from bayeszip.errors import listed
from bayeszip.fitting import Figures, Phase
from bayeszip.fitting.course import is_pruning
from bayeszip.result import Fit, Result, left_out
from bayeszip.schedules import SCHEDULES
from bayeszip.summary import show_bytes

__all__ = ["findings", "reach_of"]

#: A loss of accuracy, in points, and a share of a loss or metric, that are worth a warning.
POINTS, SHARE = 1.0, 0.1
#: How far log σ² must be able to grow, or else a weight to move, for the prior to tell weights from noise: from
#: σ² = e⁻¹⁰ a weight of 0.02 is noise (α > e³) after five, and with the means moving as well, half of that will do.
REACH, REACH_OF_MEANS = 2.5, 0.2
#: Outputs that differ by less than this between examples, in units of their size, say the same to all of them.
CONSTANT = 1e-4


def findings(result: Result) -> tuple[str, ...]:
    """All that there is to say, the worst first."""
    fit = result.fit
    if fit is None:
        return ()
    said = (finding(result, fit) for finding in FINDINGS)
    return tuple(sentence for sentence in said if sentence is not None)


def at_chance_before(result: Result, fit: Fit) -> str | None:
    """Nothing was learnt that could be kept."""
    if not _is_chance(fit.before):
        return None
    return (
        f"the network was at chance before it was compressed ({_percent(fit.before.accuracy)} of the validation data, "
        f"of which {_percent(fit.before.chance)} are of one class): were its weights forgotten (--weights, "
        "pretrain=True)?"
    )


def at_chance_after(result: Result, fit: Fit) -> str | None:
    """Everything was lost."""
    if _is_chance(fit.before) or not _is_chance(result.figures):
        return None
    return (
        f"the compressed network is at chance: {_percent(result.figures.accuracy)} of the validation data, "
        f"{_percent(fit.before.accuracy)} before. {_REMEDY}"
    )


def constant(result: Result, fit: Fit) -> str | None:
    """Whatever goes in, the same comes out."""
    before, after = fit.before.spread, result.figures.spread
    if before is None or after is None or before <= CONSTANT or after > CONSTANT:
        return None
    return f"the outputs of the compressed network no longer depend on its inputs. {_REMEDY}"


def died(result: Result, fit: Fit) -> str | None:
    """Layers without a weight left."""
    if not result.died:
        return None
    one = len(result.died) == 1
    return f"{listed(result.died)} died: not one weight is left in {'it' if one else 'them'}. {_REMEDY}"


def unread(result: Result, fit: Fit) -> str | None:
    """Parts that the file doesn't hold."""
    return left_out(result)


def fell(result: Result, fit: Fit) -> str | None:
    """The validation figure fell by more than a point, or a tenth."""
    before, after = fit.before, result.figures
    if before.accuracy is not None and after.accuracy is not None:
        drop = 100 * (before.accuracy - after.accuracy)
        if drop <= POINTS + 1e-9 or _is_chance(after):
            return None
        fallen = f"accuracy fell by {drop:.2f} points, to {_percent(after.accuracy)}"
    elif before.loss is not None and after.loss is not None and after.loss - before.loss > SHARE * abs(before.loss):
        fallen = f"loss rose from {before.loss:.4g} to {after.loss:.4g}"
    else:
        return None
    return f"the validation {fallen}. {_REMEDY} A target (max_accuracy_drop, max_loss_increase) keeps to a limit"


def metric_fell(result: Result, fit: Fit) -> str | None:
    """The caller's own figure is worse by more than a tenth."""
    before, after = fit.before.metric, result.figures.metric
    if fit.metric is None or before is None or after is None:
        return None
    worse = before - after if fit.metric.higher_is_better else after - before
    if worse <= SHARE * abs(before):
        return None
    return f"the validation {fit.metric.name} went from {before:.4g} to {after:.4g}. {_REMEDY}"


def metric_is_nan(result: Result, fit: Fit) -> str | None:
    """The caller's own figure is no number, though the network was judged."""
    if fit.metric is None or result.figures.loss is None or result.figures.metric is not None:
        return None
    before = "" if fit.before.metric is not None else ", and was before"
    return (
        f"the validation {fit.metric.name} is not a number{before}, so nothing is said of it: does it suit each batch?"
    )


def too_short(result: Result, fit: Fit) -> str | None:
    """The prior had no time to tell weights from noise, so that snapping took what came."""
    if fit.reach is None or fit.reach >= 1:
        return None
    return (
        "the training was too short for the prior: its steps and learning rates let weights and variances go "
        f"{100 * fit.reach:.0f} % of the way that it takes to tell weights from noise. Train longer (epochs_scale), or "
        "raise all.rate_log_sigma2"
    )


def no_smaller_than_packed(result: Result, fit: Fit) -> str | None:
    """Packing makes as small a file, without any training."""
    if result.packed is None:
        return None
    size, is_packed = show_bytes(result.packed), result.moved is not None
    if result.packed >= result.bytes and not is_packed:
        return None
    if is_packed:
        return (
            f"training led to no better file than `pack` makes of the network as it came ({size}), so this is what "
            "`pack` makes. Train longer (epochs_scale), or raise the prior's weight (all.tau1)"
        )
    frozen = ", quantizing what is frozen" if any(why.endswith("frozen") for _, why in fit.conversion.kept) else ""
    return (
        f"`pack` makes a file of {size} of the network as it came{frozen}; this one has {show_bytes(result.bytes)}. "
        "Train longer (epochs_scale), or raise the prior's weight (all.tau1)"
    )


def left_raw(result: Result, fit: Fit) -> str | None:
    """Layers that could not be compressed, and what that costs; what was to stay as it is, did."""
    wanted = ("frozen", "excluded")
    kept = {name for name, why in fit.conversion.kept if not why.endswith(wanted) and "Norm" not in why}
    parents = {tensor.name.rpartition(".")[0].rpartition(".")[0] for tensor in result.description.tensors}
    raw: dict[str, int] = {}
    for tensor in result.description.tensors:
        owner = tensor.name.rpartition(".")[0]
        is_parameter = tensor.name not in result.beside  # nobody expects buffers and constants to be compressed
        is_raw = tensor.kind != "quantized" and tensor.bytes and is_parameter
        if not is_raw or not kept.intersection((tensor.name, owner)):
            continue
        # Of a module with others in it, which may be compressed, this tensor alone.
        name = owner if owner in kept and owner and owner not in parents else tensor.name
        raw[name] = raw.get(name, 0) + tensor.bytes
    if not raw:
        return None
    return (
        f"{listed(list(raw))} could not be compressed and {'was' if len(raw) == 1 else 'were'} left raw: "
        f"{show_bytes(sum(raw.values()))} of the file's {show_bytes(result.bytes)}"
    )


_REMEDY = "Lower the prior's weight (all.tau1), or train longer (epochs_scale)."

#: The worst first.
FINDINGS: tuple[Callable[[Result, Fit], str | None], ...] = (
    at_chance_before,
    at_chance_after,
    constant,
    died,
    unread,
    fell,
    metric_fell,
    metric_is_nan,
    too_short,
    no_smaller_than_packed,
    left_raw,
)


def reach_of(phases: Sequence[tuple[Phase, int]], *, means: bool = True) -> float | None:
    """How far weights and variances get in phases of so many steps, in units of how far they must get.

    Adam moves by its rate a step, at most; whichever gets further counts. None: no phase has the prior.

    Args:
        means: whether the weights move at the recipe's rates.
    """
    trained = [(phase, steps) for phase, steps in phases if is_pruning(phase) and phase.noise and steps]
    if not trained:
        return None
    # Every schedule is a constant, or falls to 0 so that half of it is left in the mean.
    weighed = [(phase, steps * SCHEDULES[phase.schedule](0.5)) for phase, steps in trained]
    variances = sum(phase.rate_log_sigma2 * steps for phase, steps in weighed) / REACH
    moved = sum(phase.rate_theta * steps for phase, steps in weighed) / REACH_OF_MEANS
    return max(variances, moved if means else 0.0)


def _is_chance(figures: Figures) -> bool:
    if figures.accuracy is None or figures.chance is None or not figures.targets or figures.chance == 1:
        return False
    deviation = math.sqrt(figures.chance * (1 - figures.chance) / figures.targets)
    return figures.accuracy <= figures.chance + 2 * deviation


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f} %"
