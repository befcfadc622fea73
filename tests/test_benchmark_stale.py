"""Which results are stale, and why."""

import json
import subprocess
from pathlib import Path

import pytest
from benchmark_helpers import refusal

from benchmarks.common import results
from benchmarks.common.programs import ROOT
from benchmarks.common.results import git
from benchmarks.tools import readme, stale

SCRIPT = '"""Docstring."""\n\n\ndef f(x):\n    """What it does."""\n    return x + 1  # why\n'


@pytest.fixture
def source():
    """A fresh source at the commit of today: a function that changes it."""
    commit = git("rev-parse", "HEAD")
    if not commit:
        pytest.skip("there is no git history here")
    return lambda **changes: stale.Source(
        **{"name": "x", "commit": commit, "command": "./run.sh x", "is_clean": True, "files": [], "pair": ""} | changes
    )


def test_without_the_history_nothing_is_noted(monkeypatch, capsys):
    """As in a shallow clone, where all commits but the last would seem to be missing."""
    for answer in ("", "true"):
        monkeypatch.setattr(stale, "git", lambda *_, x=answer: x)
        assert "git fetch --unshallow" in refusal(stale.main, ["--note"], capsys)


def test_only_what_a_script_does_counts():
    same = '"""Other words."""\n\ndef f( x ):\n    # no reason\n    return x+1\n'
    assert stale.code(SCRIPT) == stale.code(same) != stale.code(SCRIPT.replace("1", "2"))


def test_reasons(source, monkeypatch):
    assert stale.reasons(source()) == []
    assert stale.reasons(source(command=None)) == ["it does not name its command"]
    assert stale.reasons(source(is_clean=False)) == ["it was made with uncommitted changes"]
    assert stale.reasons(source(commit="0123456789abcdef")) == ["commit 0123456789ab is not in the history"]
    assert stale.reasons(source(commit=None)) == ["commit none is not in the history"]
    monkeypatch.setattr(stale, "has_changed", lambda file, *_: file == "scripts/dqn.py")
    assert stale.reasons(source(files=["scripts/ppo.py", "scripts/dqn.py"])) == ["dqn.py has changed"]
    assert stale.reasons(source(changed_until="abc")) == ["the code changed while it ran, until abc"]


@pytest.mark.parametrize(
    ("path", "names", "files"),
    [
        ("ladder/ppo.json", ["eager"], ["rungs.py"]),
        ("limits/ppo.json", [], ["limits.py"]),
        ("throughput/ppo.json", ["eager", "sb3"], ["peers.py"]),
        ("throughput/ppo_atari_envpool_bf16.json", ["compile", "sb3"], ["peers.py", "peer_envpool.py"]),
        ("throughput/ppo_atari_envpool.json", ["eager"], []),
        ("throughput/ppo_ray.json", ["eager", "rllib"], ["peer_rllib.py"]),
        ("throughput/dqn_beside_cleanrl.json", ["eager", "leanrl"], ["peer_cleanrl.py"]),
        ("speedrun/ppo.json", ["record", "sb3-defaults"], ["peers.py"]),
        ("throughput/ppo.json", ["eager"], []),
    ],
)
def test_what_drives_peers_and_rungs_counts_too(path, names, files):
    """But not the words on what differs, which are in the same file."""
    found = stale.makers(stale.RESULTS / path, {"contestants": dict.fromkeys(names)})
    assert [Path(file).name for file in found] == files and all((ROOT / file).exists() for file in found)
    text = "DIFFERENCES = {}\n\n\ndef train():\n    return 1\n"
    assert stale.code(text) == stale.code(text.replace("{}", "{1: 2}")) != stale.code(text.replace("n 1", "n 2"))


def test_a_changed_script_is_seen(source, tmp_path, monkeypatch):
    commit, name = source().commit, "scripts/ppo.py"
    text = git("show", f"{commit}:{name}")
    (tmp_path / "scripts").mkdir()
    for content, changed in ((f"# a comment\n{text}", False), (f"{text}\nprint()\n", True)):
        (tmp_path / name).write_text(content)
        monkeypatch.setattr(stale, "ROOT", tmp_path)
        stale.has_changed.cache_clear()
        assert stale.has_changed(name, commit, "ppo", "learning/ppo/report.json") is changed
    stale.has_changed.cache_clear()


# Whether results in a file, of a pair, at each of five commits are stale, after each of them
NONE, SECOND = [[False] * i for i in range(1, 6)], [True, True, False]
EXPECTED = {
    ("learning/all/b.json", "ppo"): [*NONE[:4], [True] * 4 + [False]],
    ("throughput/a.json", "ppo"): [*NONE[:3], [True] * 3 + [False], [True] * 4 + [False]],
    ("learning/sac/a.json", "sac"): [*NONE[:2], SECOND, [*SECOND, False], [True] * 4 + [False]],
    ("learning/all/b.json", "sac"): [*NONE[:2], SECOND, [*SECOND, False], [True] * 4 + [False]],
    ("learning/all/c.json", "sac"): [*NONE[:2], SECOND, [True] * 3 + [False], [True] * 4 + [False]],
    ("throughput/a.json", "sac"): [*NONE[:2], SECOND, [True] * 3 + [False], [True] * 4 + [False]],
}


def test_a_commit_may_say_that_results_stay(tmp_path, monkeypatch):
    """A file of five commits: all results from before the second stay, from before the third those of two pairs.

    From before the fourth those in two folders and one file, and from before the fifth none.
    """

    def run(*words):
        done = subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    monkeypatch.setattr(stale, "git", run)
    monkeypatch.setattr(stale, "ROOT", tmp_path)
    (tmp_path / "scripts").mkdir()
    run("init", "-q")
    own = ("-c", "user.email=a@b", "-c", "user.name=a")
    commits = []
    stays = "Results-stay: only an error is worded otherwise"
    lines = "", stays, "Results-stay-of: dqn ppo", "Results-stay-in: inference learning/sac learning/all/b.json", ""
    for i, line in enumerate(lines):
        (tmp_path / "scripts" / "x.py").write_text(f"print({i})\n")
        run("add", ".")
        run(*own, "commit", "-q", "-m", f"Change\n\n{line}")
        commits.append(run("rev-parse", "HEAD"))
        for cached in (stale.has_changed, stale.code_at, stale.keeps_results):
            cached.cache_clear()
        for (result, pair), expected in EXPECTED.items():
            found = [stale.has_changed("scripts/x.py", commit, pair, result) for commit in commits]
            assert found == expected[i], (result, pair)
    for cached in (stale.has_changed, stale.code_at, stale.keeps_results):
        cached.cache_clear()


def test_what_a_commit_did_not_say_can_be_said_later(tmp_path, monkeypatch):
    """In the file of `STAYS`, which says why; each of its commits is in the history."""
    told = json.loads(stale.STAYS.read_text())
    assert told and all(stale.is_in_history(commit) and len(own["why"]) > 20 for commit, own in told.items())
    path = tmp_path / "stays.json"
    path.write_text(json.dumps({"a" * 40: {"why": "", "Results-stay-of": "dqn ppo", "Results-stay-in": "learning"}}))
    monkeypatch.setattr(stale, "STAYS", path)
    assert stale.trailers.__wrapped__("a" * 40) == [[], ["dqn", "ppo"], ["learning"]]


def test_results_that_are_written_do_not_make_the_code_another_one(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "code_at_start", results.code_state)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    git("init", "--quiet")
    (tmp_path / "benchmarks" / "results" / "x.json").write_text("{}")
    assert results.provenance()["uncommitted_changes"] is False
    (tmp_path / "benchmarks" / "x.py").write_text("")
    assert results.provenance()["uncommitted_changes"] is True


def test_code_that_changes_while_it_is_measured_is_noticed(tmp_path, monkeypatch):
    """A result names the commit that it began with; a commit of words in between does not count, one of code does."""
    monkeypatch.setattr(results, "ROOT", tmp_path)
    git("init", "--quiet")

    def commit(name: str) -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
        git("add", ".")
        git("-c", "user.email=a@b", "-c", "user.name=a", "commit", "--quiet", "-m", name)
        return git("rev-parse", "HEAD")

    for name in ("scripts", "benchmarks", "requirements"):
        first = commit(f"{name}/x.py")
    results.code_at_start.cache_clear()
    results.code_at_start()
    commit("README.md")
    own = results.provenance()
    assert own["commit"] == first and "changed_until" not in own and not own["uncommitted_changes"]
    last = commit("scripts/y.py")
    own = results.provenance()
    assert own["commit"] == first and own["changed_until"] == last and last[:12] in results.commit_of(own)
    begun = {"commit": first, "uncommitted_changes": False}  # by a process that was stopped
    results.code_at_start.cache_clear()
    assert results.provenance()["commit"] == last
    assert results.provenance(begun)["commit"] == first and results.provenance(begun)["changed_until"] == last
    results.code_at_start.cache_clear()


def test_rows_of_a_report_have_the_commits_of_their_runs():
    row = {"script": "ppo", "env_id": "CartPole-v1", "variant": "compile --bf16", "commits": ["abc", "def-dirty"]}
    path = stale.RESULTS / "learning" / "ppo" / "report.json"
    found = list(stale.sources_of(path, {"pairs": [], "rows": [row], "provenance": {"command": "./run.sh sweep"}}))
    assert [(x.commit, x.is_clean) for x in found] == [("abc", True), ("def", False)]
    assert found[0].files == ["scripts/ppo_torchcompile.py"] and "CartPole-v1" in found[0].name


@pytest.mark.slow
def test_what_is_stale_is_noted_and_marked():
    """A result that the code of today might not give again says so wherever it is shown."""
    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("this checkout has no history, by which to tell")
    found, noted = stale.stale(), json.loads(readme.NOTED.read_text())
    new = "\n".join(f"{name}: {'; '.join(why)}" for name, why in found.items() if name not in noted)
    hint = "measure again, or ./run.sh stale --note and ./run.sh readme"
    assert not new, f"stale, and not noted: {hint}\n{new}"
    assert not noted.keys() - found.keys(), f"noted, and not stale any more: {hint}\n{noted.keys() - found.keys()}"
    for name in noted:
        assert (readme.RESULTS / name.partition(": ")[0]).exists()


def test_marks_are_of_what_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "NOTED", tmp_path / "stale.json")
    assert readme.mark("throughput/ppo.json") == "" and readme.legend(["| a † |"]) != [] == readme.legend(["| a |"])
    row = "learning/x/report.json", "ppo", "CartPole-v1", "compile --bf16"
    readme.NOTED.write_text(json.dumps({"throughput/ppo.json": ["why"], f"{row[0]}: {', '.join(row[1:])}": ["why"]}))
    assert readme.mark("throughput/ppo.json") == readme.mark(*row) == " †"
    assert readme.mark("throughput/dqn.json") == readme.mark(*row[:3], "eager") == readme.mark(row[0]) == ""


def test_note_is_of_what_is_stale(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stale, "NOTED", stale.ROOT / "runs" / "stale.json")
    monkeypatch.setattr(
        stale, "write_json", lambda path, content: (tmp_path / path.name).write_text(json.dumps(content))
    )
    monkeypatch.setattr(stale, "stale", lambda: {"x.json": ["it does not name its command"]})
    stale.main(["--note"])
    assert json.loads((tmp_path / "stale.json").read_text()) == {"x.json": ["it does not name its command"]}
    assert "x.json: it does not name its command" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        stale.main(["--notes"])


def test_code_that_is_edited_while_it_is_measured_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "scripts").mkdir()
    git("init", "--quiet")
    (tmp_path / "scripts" / "x.py").write_text("")
    git("add", ".")
    git("-c", "user.email=a@b", "-c", "user.name=a", "commit", "--quiet", "-m", "x")
    results.code_at_start.cache_clear()
    assert results.provenance()["uncommitted_changes"] is False
    (tmp_path / "scripts" / "x.py").write_text("print()")
    assert results.provenance()["uncommitted_changes"] is True
    results.code_at_start.cache_clear()


@pytest.mark.parametrize(
    ("path", "result", "files"),
    [
        ("throughput/ppo.json", {"script": "ppo"}, ["ppo.py", "ppo_torchcompile.py"]),
        ("inference/ppo.cpu.json", {"network": "ppo"}, ["ppo.py", "ppo_torchcompile.py", "networks.py", "paths.py"]),
        ("scaling/scaling.json", {"settings": {"script": "ppo_ray"}},
         ["ppo_ray.py", "ppo_ray_torchcompile.py", "peers.py", "sleeping.py"]),
        ("scaling/impala_ray/scaling.json", {"settings": {"script": "impala_ray"}},
         ["impala_ray.py", "impala_ray_torchcompile.py", "peers.py", "sleeping.py", "ppo_ray.py"]),
        ("tune/a.json", {"search": {"script": "ppo"}}, ["ppo.py"]),
        ("backends/SlowA.json", {"script": "ppo"}, ["ppo.py", "ppo_torchcompile.py", "sleeping.py"]),
        ("backends/another_cpu/SlowA.json", {"script": "ppo"}, ["ppo.py", "ppo_torchcompile.py", "sleeping.py"]),
        ("env_pools/a.json", {}, ["ppo_env_pool.py", "ppo_env_pool_torchcompile.py", "peers.py", "sleeping.py"]),
    ],
)  # fmt: skip
def test_a_result_is_of_the_files_that_it_measured(path, result, files):
    """Both of a pair; and it is no cleaner than it says."""
    source = {"commit": "abc", "command": "./run.sh x", "uncommitted_changes": True, "changed_until": "def"}
    (found,) = stale.sources_of(stale.RESULTS / path, result | {"provenance": source})
    assert [Path(file).name for file in found.files] == files
    assert (found.commit, found.is_clean, found.changed_until) == ("abc", False, "def")


def test_outcomes_of_tests_on_a_gpu_are_of_all_scripts():
    source = {"commit": "abc", "command": "./run.sh gpu correctness", "uncommitted_changes": False}
    result = {"results": {"tests/test_a.py::test_x": "PASSED"}, "provenance": source}
    (found,) = stale.sources_of(stale.RESULTS / "gpu" / "tests.json", result)
    assert len(found.files) == 2 * len(stale.pairs())


def test_each_of_several_results_in_a_file_may_be_stale(tmp_path, monkeypatch):
    source = {"commit": "0" * 40, "command": "./run.sh gpu", "uncommitted_changes": False}
    (tmp_path / "gpu").mkdir()
    commands = {"ppo": "./run.sh gpu", "dqn": None}
    own = [{"script": script, "provenance": source | {"command": told}} for script, told in commands.items()]
    (tmp_path / "gpu" / "speed.json").write_text(json.dumps(own))
    monkeypatch.setattr(stale, "RESULTS", tmp_path)
    (why,) = stale.stale().values()
    assert why == ["commit 000000000000 is not in the history", "it does not name its command"]


def test_a_commit_of_another_branch_is_not_in_the_history(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    git("init", "--quiet")
    own, found = ("-c", "user.email=a@b", "-c", "user.name=a"), []
    for branch in ("one", "two"):
        git("checkout", "--quiet", "--orphan", branch)
        git(*own, "commit", "--quiet", "--allow-empty", "-m", branch)
        found.append(git("rev-parse", "HEAD"))
    assert [stale.is_in_history(commit) for commit in found] == [False, True]
