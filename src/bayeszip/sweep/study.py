"""The study that all workers of a sweep share: a file or a database, which any number of machines may join.

A trial counts unless its worker was lost; what a lost worker had begun is queued again for whoever comes next.

    waiting ──ask──► running ──► complete | pruned | failed (an error of the trial itself: it counts)
                        └── worker lost ──► failed, and its settings wait again
"""

import contextlib
import functools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from bayeszip.errors import ModelError, OutputError, OutputUsageError, RecipeError
from bayeszip.fitting.checkpoint import differences

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

__all__ = ["SharedStudy", "check_optuna", "open_study"]

NAME = "bayeszip"

#: Seconds between two signs of life of a running trial, and without one until its worker is taken for lost.
SIGN_EVERY, LOST_AFTER = 30.0, 600.0

#: A trial whose workers were lost so often is likely what ends them.
MOST_RETRIES = 3

#: User attributes of a trial.
WORKER, ALIVE, LOST, ERROR, RETRIES = "worker", "alive", "lost", "error", "retries"

#: Field → value, as Optuna holds them.
Settings = Mapping[str, Any]

P = ParamSpec("P")
T = TypeVar("T")


def _guarded(method: "Callable[Concatenate[SharedStudy, P], T]") -> "Callable[Concatenate[SharedStudy, P], T]":
    """What goes wrong with the storage in `method`, as one error with its name."""

    @functools.wraps(method)
    def guarded(self: "SharedStudy", *args: P.args, **options: P.kwargs) -> T:
        with _reading(self.storage):
            return method(self, *args, **options)

    return guarded


def check_optuna() -> None:
    """Refuse a sweep that can't begin.

    Raises:
        ModelError: optuna is not installed.
    """
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise ModelError("a sweep needs optuna: pip install 'bayeszip[sweep]'") from error


class SharedStudy:
    """Trials asked for, told and counted, among workers that may be lost at any moment.

    Args:
        study: Optuna's.
        wanted: how many trials the study is to have, whoever runs them.
        storage: where it is kept, as the user names it.
        grid: if only lists are varied, all there is to try, in order; nothing is tried twice.

    Every method raises OutputError if the storage can't be read or written any more.
    """

    def __init__(self, study: "optuna.Study", wanted: int, storage: str, grid: Sequence[Settings] = ()) -> None:
        self.study, self.storage, self._grid = study, storage, grid
        self.wanted = min(wanted, len(grid)) if grid else wanted
        #: The trial whose worker said last that it is alive, and when.
        self._signed = (-1, 0.0)

    @_guarded
    def ask(self) -> "optuna.Trial | None":
        """The next trial; None when the study has, or is about to have, as many as wanted."""
        while True:
            self._revive()
            if not self._queue_next():
                return None
            trial = self.study.ask()
            self._note(trial, {WORKER: {"host": socket.gethostname(), "pid": os.getpid()}})
            self.sign(trial)
            # Another may have asked at the same moment. Numbers are given once, so all agree on who came too late.
            trials = _counted(self._trials())
            before = [other for other in trials if other.number < trial.number]
            if len(before) >= self.wanted:
                self._lose(trial.number)
                return None
            own = next((_settings(other) for other in trials if other.number == trial.number), {})
            if not self._grid or (own and own not in map(_settings, before)):
                return trial
            self._lose(trial.number)

    @_guarded
    def sign(self, trial: "optuna.Trial") -> None:
        """Say that the worker of `trial` is alive; costs nothing if it was said just now."""
        number, before = self._signed
        now = time.time()
        if number != trial.number or now - before >= SIGN_EVERY:
            self._signed = (trial.number, now)
            self._note(trial, {ALIVE: now})

    @_guarded
    def complete(self, trial: "optuna.Trial", values: tuple[float, float], **facts: Any) -> None:
        self._note(trial, facts)
        self.study.tell(trial, values, skip_if_finished=True)

    @_guarded
    def prune(self, trial: "optuna.Trial", **facts: Any) -> None:
        from optuna.trial import TrialState

        self._note(trial, facts)
        self.study.tell(trial, state=TrialState.PRUNED, skip_if_finished=True)

    @_guarded
    def fail(self, trial: "optuna.Trial", error: str) -> None:
        from optuna.trial import TrialState

        self._note(trial, {ERROR: error})
        self.study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)

    @_guarded
    def give_back(self, trial: "optuna.Trial") -> None:
        """Leave `trial` to whoever asks next."""
        if self._lose(trial.number):
            self._queue_again(trial.params, int(trial.user_attrs.get(RETRIES, 0)))

    @_guarded
    def finished(self, *states: str) -> list["FrozenTrial"]:
        """Trials that ended in one of the states COMPLETE, PRUNED, FAIL; failed ones only if by themselves."""
        return [trial for trial in _counted(self._trials()) if trial.state.name in states]

    def _queue_next(self) -> bool:
        """Whether there is something to ask for; of a grid, put the next that nobody has tried into the queue."""
        trials = self._trials()
        if any(trial.state.name == "WAITING" for trial in trials):
            return True
        counted = _counted(trials)
        if len(counted) >= self.wanted:
            return False
        tried = [_settings(trial) for trial in counted]
        untried = next((settings for settings in self._grid if settings not in tried), None)
        if untried is not None:
            self.study.enqueue_trial(dict(untried))
        return True

    def _trials(self) -> list["FrozenTrial"]:
        return self.study.get_trials(deepcopy=False)

    def _note(self, trial: "optuna.Trial", facts: Mapping[str, Any]) -> None:
        from optuna.exceptions import UpdateFinishedTrialError

        # A worker that was taken for lost too early: another one runs this trial now, and what comes here is too late.
        with contextlib.suppress(UpdateFinishedTrialError):
            for name, value in facts.items():
                trial.set_user_attr(name, value)

    def _revive(self) -> None:
        """Queue again what lost workers had begun."""
        for trial in self._trials():
            if trial.state.name == "RUNNING" and _is_lost(trial) and self._lose(trial.number):
                self._queue_again(trial.params, int(trial.user_attrs.get(RETRIES, 0)) + 1)

    def _lose(self, number: int) -> bool:
        """Mark a running trial as lost; False if another worker was faster."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        # Optuna has no public way to mark the trial of another process.
        trial_id = self.study._storage.get_trial_id_from_study_id_trial_number(self.study._study_id, number)
        try:
            self.study._storage.set_trial_user_attr(trial_id, LOST, True)
            self.study._storage.set_trial_state_values(trial_id, TrialState.FAIL)
        except UpdateFinishedTrialError:
            return False
        return True

    def _queue_again(self, settings: Mapping[str, Any], retries: int) -> None:
        if retries <= MOST_RETRIES:
            self.study.enqueue_trial(dict(settings), user_attrs={RETRIES: retries})


def open_study(
    storage: str, plan: Mapping[str, Any], *, trials: int, seed: int, grid: Sequence[Settings] = ()
) -> SharedStudy:
    """Create the study in `storage`, or join it.

    Args:
        storage: `journal:FILE`, or a database as SQLAlchemy names it, such as `sqlite:///FILE`.
        plan: what all workers must agree on.
        trials: how many the study is to have.
        seed: of what the worker that creates the study tries.
        grid: if only lists are varied, all that can be tried.

    Raises:
        ModelError: optuna is not installed.
        OutputError: the storage can't be read or written.
        RecipeError: the study in it follows another plan; shows the differences.
    """
    check_optuna()
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with _reading(storage):
        backend = _backend(storage)
        try:
            study = optuna.create_study(storage=backend, study_name=NAME, directions=["minimize", "minimize"])
            numbers = np.random.SeedSequence([seed])
        except optuna.exceptions.DuplicatedStudyError:
            study = optuna.load_study(storage=backend, study_name=NAME)
            # Workers that join must not try what the first one tries.
            numbers = np.random.SeedSequence([seed, len(study.get_trials(deepcopy=False)), os.getpid()])
        study.sampler = optuna.samplers.TPESampler(seed=int(numbers.generate_state(1)[0]))
        known = study.user_attrs.get("plan")
        if known is None:
            study.set_user_attr("plan", dict(plan))
    found = differences(known, json.loads(json.dumps(plan))) if known is not None else []
    if found:
        raise RecipeError(
            f"the study in {storage} is of another sweep:\n  "
            + "\n  ".join(found)
            + "\nGive the same options, or another --storage and folder."
        )
    order = np.random.default_rng(seed).permutation(len(grid))
    return SharedStudy(study, trials, storage, [grid[index] for index in order])


def _backend(storage: str) -> Any:
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    kind, _, rest = storage.partition(":")
    if not rest:
        raise OutputUsageError(f"{storage!r} is no storage; give journal:FILE or a database such as sqlite:///FILE")
    if kind == "sqlite":
        # One worker writes at a time; the others wait for it.
        return RDBStorage(storage, engine_kwargs={"connect_args": {"timeout": 60}})
    if kind != "journal":
        return RDBStorage(storage)
    Path(rest).parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(rest))


@contextlib.contextmanager
def _reading(storage: str) -> Iterator[None]:
    """What goes wrong with a storage, with its name on it. Each driver has errors of its own, so all are taken."""
    try:
        yield
    except OutputError:
        raise
    except Exception as error:
        said = str(error).splitlines() or [""]
        raise OutputError(
            f"the storage {storage} can't be used ({type(error).__name__}: {said[0]}); "
            "give journal:FILE or a database such as sqlite:///FILE that is there"
        ) from error


def _is_lost(trial: "FrozenTrial") -> bool:
    """Whether the worker of a running trial is gone: known at once on this machine, elsewhere from its silence."""
    worker = trial.user_attrs.get(WORKER)
    if worker is not None and worker["host"] == socket.gethostname() and not _is_running(worker["pid"]):
        return True
    began = trial.datetime_start.timestamp() if trial.datetime_start else 0.0
    return time.time() - max(began, trial.user_attrs.get(ALIVE, 0.0)) > LOST_AFTER


def _is_running(pid: int) -> bool:
    """Whether it is another process that is there. Who asks runs no trial, so his own number is that of one gone."""
    if pid == os.getpid():
        return False
    if sys.platform == "win32":  # no way to ask without sending the process something
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _settings(trial: "FrozenTrial") -> Settings:
    """What a trial tries, or will."""
    return trial.system_attrs.get("fixed_params") or trial.params


def _counted(trials: list["FrozenTrial"]) -> list["FrozenTrial"]:
    """Those that are over, under way or waiting; not those whose worker was lost."""
    return [trial for trial in trials if not trial.user_attrs.get(LOST)]
