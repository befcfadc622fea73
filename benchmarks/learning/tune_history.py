"""The history of the trials of ./run.sh tune, as its journal holds it.

OUT/journal.jsonl gets a line when a trial starts, reports and ends, at once on disk. Its first line has the settings of
the search.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.learning.sweep import read_journal

OBJECTIVE, INTERVALS = "objective", "intervals"  # of a report: what is searched for, and the time axis
DROPPED = "dropped"  # the state of a trial that had just begun when a search was killed, and that a resumed one misses
STATES = ("finished", "stopped", "failed")  # in which a trial has ended: with its whole budget, before it, by an error


@dataclass(eq=False)
class History:
    """A trial: its reports, whose intervals rise, and the state that it is in."""

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
        """The last report; of a trial without one, what stands for it."""
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
    """The trials of a search by their ids, in the order in which they started, but for those that were dropped."""
    found = {}
    for line in read_journal(journal)[1:]:
        found.setdefault(line["run"], History(line["run"], len(found))).take(line)
    return {name: history for name, history in found.items() if history.state != DROPPED}
