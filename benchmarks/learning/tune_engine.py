"""The search itself: Ray Tune with its schedulers and searchers, driven by the options of ./run.sh tune."""

import json
import logging
import random
import signal
from collections.abc import Callable
from pathlib import Path

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator

from benchmarks.common.programs import fail
from benchmarks.learning.sweep import Journal
from benchmarks.learning.tune import REDUCTION, Options, Search, start_ray
from benchmarks.learning.tune_history import INTERVALS, OBJECTIVE
from benchmarks.learning.tune_progress import Reporter
from benchmarks.learning.tune_report import finish
from benchmarks.learning.tune_space import Space, plain
from benchmarks.learning.tune_trial import Plan, Trial

NAME = "tune"  # of Ray Tune's own folder in OUT
TRIES = 20  # attempts to draw settings for a copy that differ from its donor's
CHECKPOINTS = 4  # checkpoints kept per trial, so that one chosen for copying is not deleted before it is copied


class Asha(ASHAScheduler):
    """ASHA that is told again, when a search is resumed, what trials had reported, as Ray Tune does not keep that."""

    def on_trial_add(self, tune_controller, trial) -> None:
        super().on_trial_add(tune_controller, trial)
        history = Reporter.current.histories.get(trial.trial_id)
        for report in history.reports if history else ():
            self.on_trial_result(tune_controller, trial, report)


class SideBySide:
    """Mixin for a population's scheduler: no member pauses for waiting ones if there is a place for every member.

    Ray Tune would pause all members while one is being restarted, so all would be restarted at each interval.
    """

    have_places = False

    def on_trial_result(self, tune_controller, trial, result: dict) -> str:
        decision = super().on_trial_result(tune_controller, trial, result)
        return TrialScheduler.CONTINUE if decision == TrialScheduler.PAUSE and self.have_places else decision


class Pbt(SideBySide, PopulationBasedTraining):
    """Population-based training (Jaderberg et al. 2017, 1711.09846)."""

    def _get_new_config(self, trial, trial_to_clone) -> tuple[dict, dict]:
        """Settings of a copy, drawn again if equal to the donor's, as both would then continue as the same run."""
        for _ in range(TRIES):
            settings, operations = super()._get_new_config(trial, trial_to_clone)
            if settings != trial_to_clone.config:
                break
        return settings, operations


def explorer(perturbed: dict[str, Space]) -> Callable[[dict], dict]:
    """The function that adjusts a copied trial's settings after Ray Tune has perturbed those with lists and ranges."""

    def explore(settings: dict) -> dict:
        for name, space in perturbed.items():
            value = plain(settings[name])
            if space.kind == "factor":
                factor = space.numbers[0]
                new = value * random.choice((factor, 1 / factor))
                value = round(new) if isinstance(value, int) else new
            settings[name] = space.within(value) if isinstance(value, int | float) else value
        return settings

    return explore


def scheduler_of(options: Options, search: Search, plan: Plan):
    """Ray Tune's scheduler, counting intervals: steps would be off by parts of a rollout, and decisions be missed."""
    if options.scheduler == "asha":
        return Asha(time_attr=INTERVALS, max_t=plan.last, reduction_factor=REDUCTION)
    if options.scheduler == "none":
        return FIFOScheduler()
    common = {"time_attr": INTERVALS, "perturbation_interval": 1, "log_config": False}
    common["custom_explore_fn"] = explorer(search.perturbed)
    if options.scheduler == "pbt":
        kept = {name: space for name, space in search.perturbed.items() if space.kind != "factor"}
        shifted = {x: list(space.numbers) if space.kind == "list" else space.domain() for x, space in kept.items()}
        scheduler = Pbt(hyperparam_mutations=shifted, **common)
    else:
        from ray.tune.schedulers.pb2 import PB2  # needs scikit-learn

        bounds = {name: list(space.numbers) for name, space in search.perturbed.items()}
        scheduler = type("Pb2", (SideBySide, PB2), {})(hyperparam_bounds=bounds, **common)
    scheduler.have_places = plan.members > 0
    return scheduler


def searcher_of(options: Options):
    """What draws the settings."""
    if options.search_algorithm == "optuna":
        import optuna
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        return OptunaSearch(seed=options.search_seed)
    return BasicVariantGenerator(random_state=options.search_seed)


def plan_of(options: Options, search: Search) -> Plan:
    flags = [*options.fixed, f"--checkpoint-every={options.interval}", "--no-tensorboard"]
    return Plan(
        program=tuple(options.program),
        flags=tuple(flags),
        folder=(options.out / "trials").resolve(),
        total_timesteps=options.total_timesteps,
        interval=options.interval,
        seeds=options.seeds_per_trial,
        slots=options.jobs,
        perturbed=tuple(search.perturbed),
        members=options.size if options.is_population and options.jobs >= options.size else 0,
        first_seed=1 + 1_000 * options.search_seed,
    )


def has_snapshot(folder: Path) -> bool:
    """Whether Ray Tune has saved trials that it can resume; SystemExit(2) if its last snapshot is broken."""
    found = sorted(folder.glob("experiment_state-*.json"))
    try:
        return bool(found) and bool(json.loads(found[-1].read_text())["trial_data"])
    except (ValueError, KeyError):
        fail(f"Ray Tune's last snapshot of the search, {found[-1]}, is broken: begin anew, with another --out")


def search_all(options: Options, search: Search, plan: Plan, reporter: Reporter) -> None:
    """Run all trials, or those that have not ended yet, to their ends."""
    logging.getLogger("ray").setLevel(logging.CRITICAL)  # a failed trial is reported in a line, with its own output
    start_ray(options)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has replaced the handler of `stoppable`
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    bundle = {"CPU": 1, "GPU": options.gpus_per_trial}
    trainable = tune.with_resources(
        tune.with_parameters(Trial, plan=plan), tune.PlacementGroupFactory([{k: v for k, v in bundle.items() if v}])
    )
    folder = options.out.resolve()
    if has_snapshot(folder / NAME):
        tuner = tune.Tuner.restore(str(folder / NAME), trainable=trainable)
    else:
        tuner = tune.Tuner(
            trainable,
            param_space=search.parameters(options.script),
            tune_config=tune.TuneConfig(
                metric=OBJECTIVE,
                mode="max",
                scheduler=scheduler_of(options, search, plan),
                search_alg=searcher_of(options),
                num_samples=options.size,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name=NAME,
                storage_path=str(folder),
                verbose=0,
                callbacks=[reporter],
                checkpoint_config=tune.CheckpointConfig(num_to_keep=CHECKPOINTS),
            ),
        )
    try:
        tuner.fit()
    finally:
        reporter.table.clear()
        ray.shutdown()


def run(options: Options, search: Search, journal: Journal) -> int:
    """Search, check what was found, and report; the exit code."""
    plan = plan_of(options, search)
    reporter = Reporter(journal, plan, options.size)
    if sum(history.has_ended for history in reporter.histories.values()) < options.size:
        search_all(options, search, plan, reporter)
    return finish(options, search, list(reporter.histories.values()))
