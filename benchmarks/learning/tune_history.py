"""The history of the trials of ./run.sh tune, as recorded in its journal.

OUT/journal.jsonl gets a line when a trial starts, reports and ends, flushed to disk at once. Its first line has the
settings of the search.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.learning.sweep import read_journal

OBJECTIVE, INTERVALS = "objective", "intervals"  # of a report: what is searched for, and the time axis
DROPPED = "dropped"  # state of a trial that began so shortly before the search was killed that a resumed one lacks it
STATES = ("finished", "stopped", "failed")  # states of an ended trial: after its full budget, earlier, by an error


@dataclass(eq=False)
class History:
    """A trial: its reports, in ascending order of intervals, and its state."""

    id: str
    number: int  # in the order in which trials started
    state: str = "started"
    settings: dict = field(default_factory=dict)  # as it began
    reports: list[dict] = field(default_factory=list)
    why: str = ""  # it failed

    @property
    def has_ended(self) -> bool:
        return self.state in STATES

    @property
    def last(self) -> dict:
        """The last report, or a placeholder if there is none."""
        nothing = {INTERVALS: 0, "steps": 0, OBJECTIVE: math.nan, "returns": [], "settings": self.settings}
        return self.reports[-1] if self.reports else nothing

    def take(self, line: dict) -> None:
        """Take up a line of the journal."""
        if line["state"] == "started":
            self.settings = self.settings or line["settings"]
        elif line["state"] == "reported":
            # After a restart, a trial may have gone back to an earlier checkpoint
            while self.reports and self.reports[-1][INTERVALS] >= line[INTERVALS]:
                self.reports.pop()
            self.reports.append(line)
        else:
            self.why = line.get("why", "")
        self.state = line["state"]


def read_histories(journal: Path) -> dict[str, History]:
    """The trials of a search by id, in the order in which they started, without the dropped ones."""
    found = {}
    for line in read_journal(journal)[1:]:
        found.setdefault(line["run"], History(line["run"], len(found))).take(line)
    return {name: history for name, history in found.items() if history.state != DROPPED}
