"""What Ray Tune reports on the trials during ./run.sh tune: recorded in the journal and shown in the terminal."""

import math
import shutil
import sys
import time
from pathlib import Path

from ray import cloudpickle
from ray.tune import Callback

from benchmarks.learning.sweep import Journal, indented, last_step, read_journal
from benchmarks.learning.tune_history import DROPPED, INTERVALS, OBJECTIVE, History, read_histories
from benchmarks.learning.tune_space import plain, show
from benchmarks.learning.tune_trial import Plan, is_whole

SHOWN = 12  # lines of the table of running trials at most


def error_of(trial) -> str:
    """The error of a failed trial. Ray Tune copies the error file into the search's folder only later."""
    file = trial.pickled_error_file
    error = cloudpickle.loads(Path(file).read_bytes()) if file and Path(file).exists() else None
    return str(getattr(error, "cause", None) or error or "Ray does not say why")


class Table:
    """A few lines at the end of the terminal that are redrawn; nothing is shown if the output is not a terminal."""

    def __init__(self):
        self.height, self.drawn = 0, 0.0
        self.is_shown = sys.stderr.isatty()

    def clear(self) -> None:
        if self.height:
            sys.stderr.write(f"\x1b[{self.height}F\x1b[J")
            sys.stderr.flush()
        self.height = 0

    def draw(self, lines: list[str]) -> None:
        self.clear()
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write("".join(f"{line[:width]}\n" for line in lines))
        sys.stderr.flush()
        self.height, self.drawn = len(lines), time.monotonic()

    def is_due(self) -> bool:
        return self.is_shown and time.monotonic() - self.drawn >= 1


class Reporter(Callback):
    """Notes in the journal what Ray Tune says of the trials, and prints a line for each that ends."""

    current = None  # that of this process

    def __init__(self, journal: Journal, plan: Plan, trials: int):
        self.journal, self.plan, self.trials, self.table = journal, plan, trials, Table()
        self.histories, self.began = read_histories(journal.path), time.monotonic()
        self.count = len({line["run"] for line in read_journal(journal.path)[1:]})  # dropped trials keep their numbers
        self.is_new = True
        Reporter.current = self

    def __reduce__(self):
        return of_this_process, ()  # Tune saves its callbacks with the search; a resumed one uses this process's

    def has_ended(self, trial) -> bool:
        """Whether a trial had ended before the search was killed, which Ray Tune's last snapshot does not show."""
        return trial.trial_id in self.histories and self.histories[trial.trial_id].has_ended

    def note(self, trial_id: str, state: str, **more) -> History:
        if trial_id not in self.histories:
            self.histories[trial_id] = History(trial_id, self.count)
            self.count += 1
        history = self.histories[trial_id]
        self.journal.note(trial_id, state, **more)
        history.take({"run": trial_id, "state": state, **more})
        return history

    def say(self, line: str) -> None:
        self.table.clear()
        print(line, flush=True)

    def on_step_begin(self, iteration: int, trials: list, **info) -> None:  # noqa: ARG002
        """Resume a search that was killed.

        Trials known only to the journal, as they started within the last second, are dropped. The others resume from
        their own folders: the checkpoint that Ray Tune knows of may be older, or from the trial that was last copied.
        """
        if self.is_new:
            for trial in filter(self.has_its_own, trials):
                trial.run_metadata.checkpoint_manager._latest_checkpoint_result = None
            known = {trial.trial_id for trial in trials}
            for trial_id in [x.id for x in self.histories.values() if not x.has_ended and x.id not in known]:
                self.journal.note(trial_id, DROPPED)
                del self.histories[trial_id]
        self.is_new = False

    def has_its_own(self, trial) -> bool:
        """Whether a trial's own folders are complete, and it was not about to copy a checkpoint that still exists."""
        folders = [self.plan.folder / trial.trial_id / f"seed{i}" for i in range(self.plan.seeds)]
        if trial.trial_id not in self.histories or not all(map(is_whole, folders)):
            return False
        settings = {name: plain(value) for name, value in trial.config.items()}
        is_copy = settings != self.histories[trial.trial_id].last["settings"]
        return not (is_copy and trial.checkpoint and Path(trial.checkpoint.path).exists())

    def on_trial_start(self, iteration: int, trials: list, trial, **info) -> None:  # noqa: ARG002
        if self.has_ended(trial):
            return
        self.note(trial.trial_id, "started", settings={name: plain(value) for name, value in trial.config.items()})

    def on_trial_result(self, iteration: int, trials: list, trial, result: dict, **info) -> None:  # noqa: ARG002
        if self.has_ended(trial):
            return
        settings = {name: plain(value) for name, value in result["config"].items()}
        kept = {name: result[name] for name in (INTERVALS, "steps", OBJECTIVE, "returns", "donor")}
        history = self.note(trial.trial_id, "reported", **kept, settings=settings)
        if result["donor"] is not None:
            donor = self.histories[result["donor"]].number
            self.say(f"trial {history.number} went on from trial {donor}: {self.stand(history)}")

    def on_trial_complete(self, iteration: int, trials: list, trial, **info) -> None:  # noqa: ARG002
        if self.has_ended(trial):
            return
        is_whole = self.histories[trial.trial_id].last[INTERVALS] >= self.plan.last
        history = self.note(trial.trial_id, "finished" if is_whole else "stopped")
        self.say(f"trial {history.number} {history.state}: {self.stand(history)}")

    def on_trial_error(self, iteration: int, trials: list, trial, **info) -> None:  # noqa: ARG002
        if self.has_ended(trial):
            return
        why, _, output = error_of(trial).partition("\n")
        history = self.note(trial.trial_id, "failed", why=why)
        lines = f"; its last lines:\n{indented(output)}" * bool(output)
        self.say(f"failed: trial {history.number}, {show(history.last['settings'])}, {why}{lines}")

    def on_step_end(self, iteration: int, trials: list, **info) -> None:  # noqa: ARG002
        if self.table.is_due():
            self.table.draw(self.lines([trial.trial_id for trial in trials if trial.status in ("RUNNING", "PAUSED")]))

    def on_experiment_end(self, trials: list, **info) -> None:  # noqa: ARG002
        self.table.clear()

    @staticmethod
    def stand(history: History) -> str:
        """How far a trial has come, in words."""
        last = history.last
        return f"{last[OBJECTIVE]:.1f} after {last['steps']:,} steps, {show(last['settings'])}"

    def steps(self, trial_id: str) -> int:
        """Environment steps that a trial has taken so far, by its log."""
        logs = [self.plan.folder / trial_id / f"seed{i}" / "metrics.jsonl" for i in range(self.plan.seeds)]
        return min(map(last_step, logs))

    def lines(self, running: list[str]) -> list[str]:
        """The table: a line about the search, one for each trial that runs."""
        ended = [x for x in self.histories.values() if x.has_ended]
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        text = f"{minutes}:{seconds:02}, {len(ended)}/{self.trials} trials ended"
        failed = sum(x.state == "failed" for x in ended)
        text += f", {failed} failed" * (failed > 0)
        known = [x for x in self.histories.values() if not math.isnan(x.last[OBJECTIVE]) and x.state != "failed"]
        if known:
            best = max(known, key=lambda x: x.last[OBJECTIVE])
            text += f", best so far {best.last[OBJECTIVE]:.1f} (trial {best.number})"
        rows = [f"{'trial':>5} {'steps':>12} {'return':>9}  settings"]
        for trial_id in [x for x in running if x in self.histories][:SHOWN]:
            history = self.histories[trial_id]
            stand = f"{history.number:>5} {self.steps(trial_id):>12,} {history.last[OBJECTIVE]:>9.1f}"
            rows.append(f"{stand}  {show(history.last['settings'])}")
        return [text, *rows]


def of_this_process() -> Reporter | None:
    return Reporter.current
