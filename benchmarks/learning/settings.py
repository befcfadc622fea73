"""The settings of runs: which of them count, which tell runs apart, and how a row of a report is named after those."""

import json
import shlex
from itertools import product, takewhile
from typing import NamedTuple

from benchmarks.common import runs
from benchmarks.common.programs import SUFFIX, VARIANTS, fields_of, pairs
from benchmarks.common.runs import in_flags

MOST_IN_A_LABEL = 4  # settings by which a row is named; if more differ, it gets a short name
# Not settings: they name the run or its place
OWN = ("env_id", "seed", "run_dir", "resume", "override", "exp_name", "tensorboard", "track", "checkpoint_every")
OWN += ("wandb_project_name", "wandb_entity", "ray_address")
# Settings that a row's name has in its own way: in the variant, or as `Run.variation` or `Run.pace`
TOLD = ("compile", "cudagraphs", *runs.USUAL, *runs.PACE)
# Settings that runs of one row may differ in, which it notes: how long, where and how safely a run learns
NOTED = ("total_timesteps", "device", "log_every", "save_replay")
NOTED += ("runner_restarts", "max_restarts", "fragment_timeout", "step_timeout")


class Group(NamedTuple):
    """Runs that make a row of a report."""

    key: tuple[str, str, str]  # script, environment, and the variant with all that its name says
    runs: list[runs.Run]
    variant: str  # without the settings
    differing: dict  # its own values of the settings that differ between the runs of its script and environment
    note: str  # what a short name stands for


def settings(run: runs.Run) -> str:
    """A run's settings, to compare and to show, without those that may differ between the runs of one group."""
    unused = (*OWN, "cudagraphs") if run.config.get("device", "cpu") == "cpu" else OWN
    return json.dumps({name: value for name, value in run.args.items() if name not in unused}, sort_keys=True)


def defaults(script: str) -> dict:
    """The defaults of one of our scripts, as config.json would hold them; of others, none are known."""
    known = fields_of(script) if script in pairs() else {}
    return json.loads(json.dumps({name: field.default for name, field in known.items()}))


def changed_settings(run: runs.Run) -> dict:
    """The settings of a run of one of our scripts that differ from its defaults; its length is told elsewhere."""
    usual = defaults(run.script)
    own = {name: value for name, value in json.loads(settings(run)).items() if name in usual}
    return {name: value for name, value in own.items() if value != usual[name] and name != "total_timesteps"}


def command_for(kept: list[runs.Run]) -> str | None:
    """The command that trains such runs anew; None if they differ in more than seeds, or are not of our scripts."""
    first, totals = kept[0], {run.args.get("total_timesteps") for run in kept}
    changed = any(part.get("changed") for run in kept for part in run.config.get("resumed", []))
    shortened = any(run.was_longer for run in kept)  # schedules, as of the learning rate, followed the whole length
    alike = len({settings(run) for run in kept}) == len({run.variant for run in kept}) == len(totals) == 1
    if first.script not in pairs() or first.variant not in VARIANTS or None in totals:
        return None
    of_twins = {"compile", "cudagraphs"}
    if changed or shortened or not alike or first.args.keys() - of_twins - defaults(first.script).keys():
        return None
    own = {name: x for name, x in changed_settings(first).items() if name not in of_twins}
    words = ["./run.sh", "sweep", "--scripts", first.script, "--variants", first.variant, "--env-ids", first.env_id]
    words += ["--seeds", *(str(run.seed) for run in kept), "--total-timesteps", str(*totals)]
    return shlex.join([*words, *([f"--flags={in_flags(own)}"] if own else [])])


def in_words(changed: dict) -> str:
    """What was changed where a run was resumed."""
    return "with " + ", ".join(f"{name} = {value}" for name, value in changed.items())


def differing_settings(members: list[runs.Run]) -> list[dict]:
    """For each run of one script and environment, its values of the settings that make rows and are not all the same.

    A setting that a run does not have, as it is older than the flag, has the script's default there.
    """
    usual, skipped = defaults(members[0].script), (*OWN, *TOLD, *NOTED)
    names = dict.fromkeys(name for run in members for name in run.args if name not in skipped)
    known = []
    for run in members:
        args = run.args if "peer" in run.config else usual | run.args
        known.append({name: args[name] for name in names if name in args})
    texts = {name: {json.dumps(own[name]) for own in known if name in own} for name in names}
    return [{name: x for name, x in own.items() if len(texts[name]) > 1} for own in known]


def in_order(values: dict) -> list[tuple]:
    """Sort key of settings: numbers by their size, after all that is none."""
    is_number = {name: isinstance(x, int | float) and not isinstance(x, bool) for name, x in values.items()}
    return [(is_number[name], x if is_number[name] else 0, json.dumps(x)) for name, x in values.items()]


def short_names(groups: list[list[runs.Run]]) -> list[str]:
    """Names that tell groups apart: of experiments, of what folders begin with, or of their parents; else numbers."""

    def experiment(own: list[runs.Run]) -> str:
        names = {str(run.args.get("exp_name") or "").removesuffix(SUFFIX) for run in own}
        return names.pop() if len(names) == 1 else ""

    def folder(own: list[runs.Run]) -> str:
        letters = zip(*(run.dir.name for run in own), strict=False)
        return "".join(x for x, *_ in takewhile(lambda x: len(set(x)) == 1, letters)).rstrip("_-. ")

    def parent(own: list[runs.Run]) -> str:
        names = {run.dir.parent.name for run in own}
        return names.pop() if len(names) == 1 else ""

    for name_of in (experiment, folder, parent):
        names = list(map(name_of, groups))
        if all(names) and len(set(names)) == len(names):
            return names
    return [f"settings {number}" for number in range(1, len(names) + 1)]


def groups(found: list[runs.Run]) -> list[Group]:
    """The groups of `runs.groups`, each divided by the settings that differ within its script and environment."""
    panels, result = {}, []
    for key, own in runs.groups(found).items():
        panels.setdefault(key[:2], []).append((key[2], own))
    for key, parts in panels.items():
        members = [run for _, own in parts for run in own]
        differing = dict(zip(members, differing_settings(members), strict=True))
        alike = {}
        for run in sorted(members, key=lambda run: in_order(differing[run])):
            alike.setdefault(json.dumps(differing[run]), []).append(run)
        values = [differing[own[0]] for own in alike.values()]
        labels, is_short = list(map(in_flags, values)), max(map(len, values)) > MOST_IN_A_LABEL
        if is_short:
            labels = [f"({name})" for name in short_names(list(alike.values()))]
        for (variant, own), (label, known, same) in product(parts, zip(labels, values, alike.values(), strict=True)):
            name, note = f"{variant} {label}".strip(), f"{label} stands for {in_flags(known)}" * is_short
            if kept := [run for run in own if run in same]:
                result.append(Group((*key, name), kept, variant, known, note))
    return result


def a_repeat(run: runs.Run, kept: runs.Run) -> dict:
    """What a report says of a run that is left out, as another one of its group and seed is kept."""
    own, others = (json.loads(settings(x)) for x in (run, kept))
    names = [name for name in own | others if own.get(name) != others.get(name)]
    how = f", with another {' and '.join(names)}, is" if names else " with the same settings is"
    mine, theirs = run.dir.parts, kept.dir.parts
    tail = next((n for n in range(1, len(theirs)) if mine[-n:] != theirs[-n:]), 1)  # parts that tell the folders apart
    return {"run": "/".join(mine[-tail:]), "why": f"seed {run.seed}{how} in {'/'.join(theirs[-tail:])}"}
