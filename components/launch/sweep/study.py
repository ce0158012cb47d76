"""Optuna study of a sweep: chooses its points by the results of the earlier ones.

The study is stored in SWEEP/optuna.journal, Optuna's journal file, in which a point is a trial. A trial stays RUNNING
until its point has ended, so that a study that was killed continues its unfinished points.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config.compose.sweep import Dimension
from components.config.compose.sweep_keys import Goal, Range
from components.launch.sweep.plan import NOT_ENDED, STOPPED_EARLY, StudyPlan, SweepRow
from components.protocol.errors import ConfigError
from components.protocol.run_files import keep_only_file

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

JOURNAL = "optuna.journal"
MOST_REPEATS = 100
"""Number of successive proposals of earlier points after which no further point is chosen."""


class PointStudy:
    """Choice of points by Optuna's tree-structured Parzen estimator (TPE), whose first 10 points are random.

    Every proposal uses a generator of its own, seeded by sweep.seed and the number of earlier proposals. A continued
    study therefore neither repeats random values nor depends on when it was interrupted.

    Args:
        directory: Folder of the sweep, whose lock this process holds.
        plan: Plan of the study.
        space: The swept keys.
        goal: Whether lower or higher values of the metric are better.

    Raises ConfigError if the journal cannot be read or written.
    """

    def __init__(self, directory: Path, plan: StudyPlan, space: Sequence[Dimension], goal: Goal) -> None:
        self.plan, self._space = plan, {each.key: each for each in space}
        self._distributions = {each.key: _distribution(each) for each in space}
        self._study = _open(directory / JOURNAL, goal)
        self.values: list[dict[str, str]] = []
        """Swept key -> its value, for each point."""
        self._trials: list[int] = []
        for trial in self._study.get_trials(deepcopy=False):
            self._add(trial)

    def choose(self) -> dict[str, str] | None:
        """Return the values of a new point; None if the study only proposes points that it has already."""
        from optuna.samplers import TPESampler

        for _ in range(MOST_REPEATS):
            number = len(self._study.get_trials(deepcopy=False))
            seed = random.Random(f"{self.plan.seed} {number}").getrandbits(32)
            self._study.sampler = TPESampler(seed=seed)
            self._study.ask(self._distributions)
            if self._add(self._study.get_trials(deepcopy=False)[number]):
                return self.values[-1]
        return None

    def unfinished(self) -> list[int]:
        """Return the numbers of the points whose results the study does not have, in order."""
        return [number for number in range(len(self._trials)) if not self._trial(number).state.is_finished()]

    def record(self, row: SweepRow, metric: str, curve: Mapping[int, float]) -> None:
        """Record the result of a point, unless it has not ended.

        A point without a finite value of the metric counts as failed. If a retry of it, or of a point that was stopped
        early, succeeds, its result becomes a trial of its own, since those of a journal are final.

        Args:
            row: The point.
            metric: The metric by which the study judges.
            curve: Step -> value of the metric; recorded if the point was stopped early.
        """
        from optuna.trial import Trial, TrialState, create_trial

        trial, value = self._trial(row.point.number), row.number(metric) if row.state == "ok" else None
        if trial.state.is_finished():
            if trial.state != TrialState.COMPLETE and value is not None:
                self._study.add_trial(create_trial(params=trial.params, distributions=trial.distributions, value=value))
        elif row.state == STOPPED_EARLY:
            for step, reached in curve.items():
                Trial(self._study, trial._trial_id).report(reached, step)
            self._study.tell(trial.number, state=TrialState.PRUNED)
        elif value is not None:
            self._study.tell(trial.number, value)
        elif row.state not in NOT_ENDED:
            self._study.tell(trial.number, state=TrialState.FAIL)

    def _trial(self, number: int) -> FrozenTrial:
        """Return the trial of a point."""
        return self._study.get_trials(deepcopy=False)[self._trials[number]]

    def _add(self, trial: FrozenTrial) -> bool:
        """Add the point of a trial; return whether it is new. An earlier point gives its result to the trial."""
        from optuna.trial import TrialState

        values = {key: self._space[key].text(value) for key, value in trial.params.items() if key in self._space}
        if len(values) < len(self._space):  # the sweep was killed while this trial was created
            if not trial.state.is_finished():
                self._study.tell(trial.number, state=TrialState.FAIL)
            return False
        if values not in self.values:
            self.values.append(values)
            self._trials.append(trial.number)
            return True
        if not trial.state.is_finished():
            known = self._trial(self.values.index(values))
            if known.state == TrialState.COMPLETE:
                self._study.tell(trial.number, known.value)
            else:
                self._study.tell(trial.number, state=TrialState.FAIL)
        return False


def space_of(dimensions: Sequence[Dimension]) -> dict[str, Any]:
    """Return the search space as it is stored in sweep.json."""
    return {
        dimension.key: list(dimension.choices) if dimension.range is None else asdict(dimension.range)
        for dimension in dimensions
    }


def dimensions_of(space: Mapping[str, Any]) -> list[Dimension]:
    """Return the search space that is stored in sweep.json."""
    return [
        Dimension(key, key, (), Range(**values))
        if isinstance(values, dict)
        else Dimension(key, key, tuple(values), None)
        for key, values in space.items()
    ]


def _distribution(dimension: Dimension) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    span = dimension.range
    if span is None:
        return CategoricalDistribution(dimension.choices)
    if span.whole:
        return IntDistribution(int(span.low), int(span.high), log=span.log)
    return FloatDistribution(span.low, span.high, log=span.log)


def _open(file: Path, goal: Goal) -> Study:
    """Open the study in a journal, or create it."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        keep_only_file(file)
        file.with_name(f"{file.name}.lock").unlink(missing_ok=True)  # of a killed sweep: the caller holds the sweep's
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(file)))
        return optuna.create_study(
            storage=storage,
            study_name="sweep",
            direction="minimize" if goal is Goal.min else "maximize",
            load_if_exists=True,
        )
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be used: {error.strerror or error}; fix that, or choose another run.dir"
        ) from error
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"{file}: is damaged and cannot be read: {error}; restore it, or choose another run.dir"
        ) from error
