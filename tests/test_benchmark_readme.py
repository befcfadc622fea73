"""What RESULTS.md claims is what the committed results say."""

import json
import re
import shutil
from unittest import mock

import numpy as np
import pytest
from matplotlib.image import imread

from benchmarks.common import results, stats
from benchmarks.common.programs import ROOT, SCRIPTS, load_script, pairs
from benchmarks.common.results import Target, commit_of, machine_folder, machine_of, provenance
from benchmarks.learning import report, time_to_score
from benchmarks.throughput import throughput
from benchmarks.tools import readme


@pytest.mark.slow
def test_the_tables_of_results_are_those_of_the_results():
    text = readme.TABLES.read_text()
    assert readme.BEGIN in text and readme.END in text
    assert text == readme.render(text)


@pytest.mark.slow
def test_a_changed_figure_is_noticed():
    text = readme.TABLES.read_text()
    row = next(line for line in text.splitlines() if line.startswith("| `ppo_continuous_action`, HalfCheetah"))
    assert readme.render(text.replace(row, row.replace("1", "2"))) == text


@pytest.mark.slow
def test_what_is_written_on_the_results_is_what_their_json_says(tmp_path):
    """Each file of Markdown below the results, made anew, is the one that is committed."""
    copy = tmp_path / "results"
    shutil.copytree(readme.RESULTS, copy)
    written = sorted(path.relative_to(copy) for path in copy.rglob("*.md"))
    for path in written:
        (copy / path).unlink()
    readme.write_summaries(copy)
    assert sorted(path.relative_to(copy) for path in copy.rglob("*.md")) == written and len(written) > 8
    for path in written:
        assert (copy / path).read_text() == (readme.RESULTS / path).read_text(), path
    for path in sorted(path.relative_to(copy) for path in copy.rglob("*.png")):
        drawn, committed = (imread(folder / path) for folder in (copy, readme.RESULTS))
        assert drawn.shape == committed.shape, path
        assert np.abs(drawn - committed).mean() < 0.01, path  # CPUs round lines to pixels differently


EPYC, ZEN_4 = "throughput/amd_epyc", "throughput/amd_epyc_family_25_model_17"
ZEN_3 = "throughput/amd_epyc_family_25_model_1"
CASCADE_LAKE = "throughput/intel_r_xeon_r_processor_2_50ghz_family_6_model_85"
RUNNERS = "num_runners_2_envs_per_runner_16_fragment_steps_32_batch_updates_1_env_backend_gymnasium_"
RUNNERS += "total_timesteps_1000000000"
HALF_CHEETAH = "env_id_HalfCheetah_v4_num_steps_1024_num_minibatches_32_update_epochs_10_learning_rate_3e_4_"
HALF_CHEETAH += "ent_coef_0_norm_obs_norm_rewards_num_runners_2_envs_per_runner_4"
RATIOS = {  # what the README says, and which ratio of which result that is
    r"which SB3 lacks, SAC has ([\d.]+) times": (f"{ZEN_4}/sac_continuous_action_bf16", "compile", "sb3"),
    r"times SB3's speed, TD3 ([\d.]+), Atari": (f"{ZEN_4}/td3_continuous_action_bf16", "compile", "sb3"),
    r"times SB3's speed, TD3 [\d.]+, Atari ([\d.]+)\.": (f"{ZEN_4}/ppo_atari_envpool_bf16", "compile", "sb3"),
    r"times; TD3: ([\d.]+) \[": ("ladder/td3_continuous_action", "9", "0"),
    r"eager `ppo_ray` is ([\d.]+) times": (f"{EPYC}/ppo_ray", "eager", "rllib"),
    r"\(HalfCheetah: ([\d.]+)\)": (f"{EPYC}/ppo_ray_{HALF_CHEETAH}", "eager", "rllib"),
    r"--batch-updates 1` (\d+) times": (f"{EPYC}/impala_ray_{RUNNERS}", "eager", "rllib"),
}


def test_figures_of_the_readme_are_those_of_the_results():
    """Its ratios of speeds, its times to a score, and its ladder."""
    text = " ".join((ROOT / "README.md").read_text().split())
    read = lambda name: json.loads((readme.RESULTS / f"{name}.json").read_text())  # noqa: E731
    for pattern, (name, ours, theirs) in RATIOS.items():
        (said,) = re.findall(pattern, text)
        (ratio,) = [x["ratio"] for x in read(name)["ratios"] if (x["of"], x["to"]) == (ours, theirs)]
        assert said == f"{ratio:.{len(said.partition('.')[2])}f}", pattern
    for peer, suffix, count in ("CleanRL", "_beside_cleanrl", 5), ("SBX", "", 5), ("LeanRL", "_beside_cleanrl", 4):
        both = {name: beside(ZEN_4, f"{name}{suffix}", peer.lower()) for name in pairs()}
        compiled = {name: x[-1] for name, x in both.items() if x}
        ends = [f"{compiled[end]:.1f} ({end[:3].upper()})" for end in sorted(compiled, key=compiled.get)[:: count - 1]]
        assert f"{ends[0]} to {ends[1]} times as fast as {peer}, " in text and len(compiled) == count
    assert "Eager TD3 shows no gain over CleanRL, eager SAC and TD3 none over SBX." in text
    alike = ("td3_continuous_action_beside_cleanrl", "cleanrl"), ("sac_continuous_action", "sbx")
    for name, peer in (*alike, ("td3_continuous_action", "sbx")):
        known = read(f"{ZEN_4}/{name}")["ratios"]
        (ends,) = [x["interval"] for x in known if (x["of"], x["to"]) == ("eager", peer)]
        assert ends[0] < 1 < ends[1]
    speeds = {x["script"]: x["contestants"] for x in read("gpu/speed")}
    said = re.findall(r"with CUDA graphs made ([\d,]+) \(SAC\), ([\d,]+) \(TD3\) and ([\d,]+) \(DQN\) steps/s", text)
    names = ("sac_continuous_action", "td3_continuous_action", "dqn")
    assert said == [tuple(f"{speeds[name]['compile+cudagraphs']['steps_per_second']:,.0f}" for name in names)]
    times = read("time_to_score/ppo_continuous_action_HalfCheetah-v4")["contestants"]
    said = re.findall(r"PPO on HalfCheetah: eager (\d+) s, compiled (\d+), cached (\d+), SB3 (\d+)\)", text)
    names = ("eager", "compile (cold)", "compile (warm)", "sb3")
    assert said == [tuple(f"{time_to_score.summarize(times[name])['each']:.0f}" for name in names)]
    tasks = [json.loads(path.read_text())["contestants"] for path in readme.RESULTS.glob("time_to_score/*.json")]
    cold = [time_to_score.beside(x["compile (cold)"], x["sb3"])[0] for x in tasks]
    assert f"{min(cold):.1f} (PPO, Acrobot) to {max(cold):.1f} times as fast as SB3" in text and len(cold) == 9
    sbx = [time_to_score.beside(x["compile (cold)"], x["sbx"]) for x in tasks if "sbx" in x]
    assert sum(low < 1 for _, (low, _) in sbx) == 3 and len(sbx) == 6, "level or ahead on 3 tasks of 6"
    ladder = re.search(r"\| a plain loop \|.*?\*\*To change a pair", text)[0]
    speeds = [f"{x['steps_per_second']:,.0f}" for x in read("ladder/ppo_continuous_action")["contestants"].values()]
    said = re.findall(r"\d,\d+", ladder)
    assert len(said) == 8 and said == [speed for speed in speeds if speed in said]


def beside(folder: str, name: str, peer: str) -> list[float]:
    """How many times as fast as a peer the files of a pair are, eager and compiled; nothing if that is not known."""
    path = readme.RESULTS / folder / f"{name}.json"
    known = json.loads(path.read_text())["ratios"] if path.exists() else []
    return [x["ratio"] for own in ("eager", "compile") for x in known if (x["of"], x["to"]) == (own, peer)]


def test_speeds_of_all_pairs_in_the_readme_are_those_of_the_results():
    """In its first table; and the range of those on other CPUs."""
    text, others = " ".join((ROOT / "README.md").read_text().split()), []
    for name in pairs():
        cell = re.search(rf"scripts/{name}_torchcompile\.py\) \| \d+ lines \| ([^|]+) \|", text)[1]
        here = beside(ZEN_4, name, "sb3")
        assert cell == (", ".join(f"{ratio:.1f}" for ratio in here) or "-")
        for folder in (EPYC, ZEN_3, CASCADE_LAKE, "throughput"):  # the last is a Xeon with AMX
            others += [x / y for x, y in zip(beside(folder, name, "sb3"), here, strict=False)]
    assert f"gave {min(others):.1f} to {max(others):.1f} times these" in text and len(others) > 30


@pytest.mark.slow
def test_ratios_and_intervals_are_those_of_what_was_measured():
    """A result holds all rounds, and a report all scores, so what was derived from them can be derived again."""
    for path in readme.RESULTS.rglob("*.json"):
        content = json.loads(path.read_text())
        results = [x for x in (content if isinstance(content, list) else [content]) if "provenance" in x]
        for result in results:
            for known in result.get("ratios", ()):
                found = throughput.ratio(result["contestants"], known["of"], known["to"])
                assert found["ratio"] == pytest.approx(known["ratio"], rel=1e-9), path
                assert found["interval"] == (known["interval"] and pytest.approx(known["interval"], rel=1e-9)), path
            if "break_even_steps" in result and "rounds" in result["contestants"].get("eager", {}):
                for name, known in throughput.compare(result["contestants"])["break_even_steps"].items():
                    expected = {cache: x and pytest.approx(x, rel=1e-9) for cache, x in known.items()}
                    assert result["break_even_steps"][name] == expected, path
            for row in result.get("rows", ()) if "pairs" in result else ():
                has_enough = len(row["seeds"]) >= report.MIN_SEEDS
                ends = report.interval([np.array(row["scores"])], stats.pooled_iqm) if has_enough else None
                assert not row["seeds"] or row["interval"] == (ends and pytest.approx(ends, rel=1e-9)), path


def test_starts_in_the_readme_are_those_of_the_results():
    """First updates of all compiled files on a CPU, and when those of four pairs have overtaken the eager ones."""
    text, firsts, evens = " ".join((ROOT / "README.md").read_text().split()), ([], []), ([], [])
    four = ("dqn", "ppo", "ppo_continuous_action", "sac_continuous_action", "td3_continuous_action")
    for path in readme.RESULTS.glob("throughput/**/*.json"):
        result = json.loads(path.read_text())
        own, steps = result["contestants"].get("compile", {}), result["break_even_steps"].get("compile", {})
        for i, key in enumerate(("cold", "warm")):
            if first := own.get(f"{key}_seconds"):
                firsts[i].append(first)
            if path.parent.name == ZEN_4.partition("/")[2] and result["script"] in four and not result["flags"]:
                evens[i].append(first + steps[key] / own["steps_per_second"])
    cold, warm = (f"{min(x):.0f} to {max(x):.0f} s" for x in firsts)
    assert f"a compiled file has it after {cold} or, once its code is cached, {warm}." in text
    cold, warm = (f"{min(x):.0f} to {max(x):.0f} s" for x in evens)
    assert f"overtake the eager file after {cold} (cached: {warm})" in text and len(evens[0]) == 10


def test_how_long_a_run_takes_is_by_the_speeds_of_the_results():
    """In docs/use.md: its steps, those of the script's defaults, by the steps/s of both files on a Zen 4."""
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \| (.+?) \| (.+?) \|$", (ROOT / "docs/use.md").read_text(), re.M)
    for name, steps, *said in rows:
        assert int(steps.replace(",", "")) == load_script(SCRIPTS / f"{name}.py").Args.total_timesteps
        known = json.loads((readme.RESULTS / ZEN_4 / f"{name}.json").read_text())["contestants"]
        minutes = [int(steps.replace(",", "")) / known[x]["steps_per_second"] / 60 for x in ("eager", "compile")]
        assert said == [f"{x / 60:.1f} h" if x > 60 else f"{max(x, 1):.0f} min" for x in minutes], name
    assert len(rows) == 6


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_results_of_another_machine_stay(tmp_path):
    """Those of this one go into a folder beside them, under the CPU's name, and into the same folder the next time."""
    ours = provenance()
    assert machine_folder(tmp_path) == tmp_path
    (tmp_path / "ppo.json").write_text(json.dumps({"provenance": ours}))
    assert machine_folder(tmp_path) == tmp_path
    other = ours | {"machine": {"cpu": "Another CPU", "cores": 2, "gpu": None}}
    (tmp_path / "dqn.json").write_text(json.dumps({"provenance": other}))
    folder = machine_folder(tmp_path)
    assert folder.parent == tmp_path and folder.name.islower() and "another" not in folder.name


def test_a_result_is_not_replaced_by_one_that_does_not_stand_for_it(tmp_path, capsys):
    """By one of another machine or question, or of fewer contestants; nor by a part of one, while that is not whole."""
    path, ours = (
        tmp_path / "ppo.json",
        {"provenance": provenance(), "score": 490, "contestants": {"eager": 1, "sb3": 2}},
    )
    question = {"score": 490, "contestants": ["sb3", "eager", "sbx"]}
    Target(path, **question).write(ours, is_whole=False)
    first = ours | {"provenance": ours["provenance"] | {"is_unfinished": True}}
    assert json.loads(path.read_text()) == first  # there was none before
    assert commit_of(first["provenance"]) == f"{commit_of(ours['provenance'])}, unfinished"

    def refused(**changes) -> str:
        with pytest.raises(SystemExit):
            Target(path, **question | changes)
        return capsys.readouterr().err

    assert "has score 490" in refused(score=400)
    assert "has the contestants sb3, which yours would lack" in refused(contestants=["eager"])
    target = Target(path, **question)
    target.write(ours | {"seeds": [1]}, is_whole=False)
    assert json.loads(path.read_text()) == first and list(tmp_path.glob("*.json")) == [path]
    target.write(ours | {"seeds": [1, 2]})
    assert json.loads(path.read_text()) == ours | {"seeds": [1, 2]} and list(tmp_path.iterdir()) == [path]
    machine = {"cpu": "Another CPU", "cores": 2, "gpu": None}
    path.write_text(json.dumps(ours | {"provenance": provenance() | {"machine": machine}}))
    assert "is of 2 cores of Another CPU" in refused()


def test_the_overview_is_of_the_machine_measured_most(tmp_path, monkeypatch):
    """Speeds and times each of their own machine; speeds as multiples of SB3's, CleanRL's by way of our compiled file.

    What is noted as stale does not choose the machine, and is marked, where a pair has nothing else.
    """

    def write(path: str, cpu: str, date: str, **more) -> None:
        source = provenance() | {"machine": {"cpu": cpu, "cores": 2, "gpu": None}, "date": date}
        own = {"script": "ppo", "env_id": "CartPole-v1", "flags": "", "score": 490, "provenance": source, **more}
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(json.dumps(own))

    speeds = {"eager": 250.0, "compile": 300.0, "sb3": 100.0, "sbx": 200.0}
    speeds = {name: {"steps_per_second": x, "rounds": [{"speeds": [x, x]}] * 3} for name, x in speeds.items()}
    times = {"eager": [{"seed": i, "reached": True, "seconds": 20.0, "steps": 1, "best": 500} for i in (1, 2)]}
    late = times["eager"][0] | {"seed": 3, "reached": False}
    write("time_to_score/a.json", "old", "2026-01-01", contestants=times)
    write("time_to_score/b.json", "new", "2026-01-02", contestants=times | {"sb3": [*times["eager"], late]})
    write("throughput/ppo.json", "old", "2026-01-01", contestants={"sb3": speeds["sb3"]})
    write("throughput/new/ppo.json", "new", "2026-01-02", contestants=speeds)
    write("throughput/fewer/ppo.json", "fewer pairs", "2026-01-09", contestants={"sb3": speeds["sb3"]})
    write("time_to_score/c.json", "fewer pairs", "2026-01-09", contestants={"sb3": times["eager"]})
    write("time_to_score/d.json", "new", "2026-01-02", contestants={"sb3": [late | {"seconds": 9.0}]}, script="dqn")
    stale = [f"throughput/stale/{i}.json" for i in range(3)]
    for path in stale:
        write(path, "stale", "2026-01-09", contestants={"sb3": speeds["sb3"]})
    for name in ("ppo", "sac"):
        stale += [f"throughput/new/{name}_older.json"]
        write(stale[-1], "new", "2026-01-01", contestants=speeds, script=name)
    (tmp_path / "noted.json").write_text(json.dumps({name: ["ppo.py has changed"] for name in stale}))
    write("throughput/new/dqn.json", "new", "2026-01-02", contestants=speeds, script="dqn", env_id="Acrobot-v1")
    write("throughput/new/ppo_b.json", "new", "2026-01-03", contestants=speeds, flags="--num-envs 8")
    write("throughput/alone/ppo.json", "speeds only", "2026-01-04", contestants=speeds)
    others = {"eager": speeds["sb3"], "compile": speeds["sbx"], "cleanrl": speeds["sb3"]}
    others |= {"leanrl": {"failed": ["exit code 1"]}}
    write("throughput/new/ppo_beside_cleanrl.json", "new", "2026-01-02", contestants=others)
    for name in ("ppo", "dqn"):  # as many as the new machine has, and later, but none beside CleanRL
        write(f"throughput/rival/{name}.json", "rival", "2026-01-08", contestants=speeds, script=name)
    write("throughput/dqn_beside_cleanrl.json", "old", "2026-01-03", contestants=others, script="dqn")
    drawn = {}
    monkeypatch.setattr(readme, "NOTED", tmp_path / "noted.json")
    monkeypatch.setattr(readme.plots, "draw_groups", lambda _axis, groups, _form: drawn.update(groups))
    readme.draw_overview(tmp_path)
    group = drawn.pop("ppo\nCartPole-v1")
    assert group.pop("cleanrl") == (
        pytest.approx(1.5),
        pytest.approx([1.5, 1.5]),
    )  # half as fast as compiled, which is three times as fast as SB3
    assert drawn.pop("dqn\nAcrobot-v1") == drawn.pop("sac †\nCartPole-v1") == group
    expected = {"eager": 2.5, "compile": 3, "sbx": 2}
    assert {name: value for name, (value, _) in group.items()} == pytest.approx(expected)
    # SB3 got there in two of three runs, which took 60 s in all, and eager in both of its own, in 20 s each
    assert drawn == {"ppo\nCartPole-v1 to 490": {"eager": (pytest.approx(1.5), [pytest.approx(1.5)] * 2)}}
    assert (tmp_path / "overview.png").exists()


def test_what_a_gpu_gave_is_shown(tmp_path, monkeypatch):
    """A row for each pair, each variant in a column, and how many of them compute what eager does."""
    (tmp_path / "gpu").mkdir()
    own = {name: {"steps_per_second": 100.0 * i} for i, name in enumerate(("eager", "compile+cudagraphs"), 1)}
    result = {"script": "ppo", "env_id": "CartPole-v1", "contestants": own | {"leanrl": {"failed": "it crashed"}}}
    ratio = {"of": "compile+cudagraphs", "to": "eager", "ratio": 2.0, "interval": None}  # of one turn
    result["ratios"] = [ratio]
    source = provenance() | {"machine": {"cpu": "Some CPU", "cores": 16, "gpu": "Some GPU"}}
    (tmp_path / "gpu" / "speed.json").write_text(json.dumps([result | {"provenance": source}]))
    equal = {"lean": {"equal": True}, "compile": {"equal": True}, "cudagraphs": {"equal": False}}
    (tmp_path / "gpu" / "parity.json").write_text(json.dumps({"results": {"ppo": equal}}))
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    monkeypatch.setattr(readme, "NOTED", tmp_path / "stale.json")
    header, _, row, *_ = readme.gpu_section()
    assert machine_of(source) == "16 cores of Some CPU, Some GPU" and "16 cores of Some CPU, Some GPU" in header
    assert row == "| `ppo`, CartPole-v1 | 100 | 200 | - | - | 2.0 | - | 2 of 3 |"
    ratio["interval"] = [1.9, 2.1]
    for own, speed in zip(result["contestants"].values(), (100.0, 200.0, 50.0), strict=True):
        own |= {"steps_per_second": speed, "rounds": [{"speeds": [speed]}] * 2}
    (tmp_path / "gpu" / "speed.json").write_text(json.dumps([result | {"provenance": source}]))
    (tmp_path / "stale.json").write_text(json.dumps({"gpu/speed.json": ["ppo.py has changed"]}))
    row = readme.gpu_section()[2]
    assert row.startswith("| `ppo`, CartPole-v1 † |") and "| 50 | - | 2.0 [1.9, 2.1] | 4.0 [4.0, 4.0] | 2 of 3 |" in row
    different = {"results": {"ppo": {"compile+cudagraphs": {"equal": False}}}}
    (tmp_path / "gpu" / "parity.json").write_text(json.dumps(different))
    assert readme.gpu_section()[2] == "| `ppo`, CartPole-v1 † | 100 | - | 50 | - | - | - | 0 of 1 |"


def test_runs_on_a_gpu_that_were_still_getting_faster_are_named():
    """LeanRL's, by a fifth or more from the first turn to the last; an empty turn has no speed."""
    turns = {"ppo": [[10.0, 11.0], [], [20.0, 22.0]], "dqn": [[10.0], [11.9]], "sac": [[10.0], [15.0]], "td3": [[5.0]]}
    results = [{"script": x, "contestants": {"leanrl": {"rounds": [{"speeds": y} for y in turns[x]]}}} for x in turns]
    results.append({"script": "a3c", "contestants": {"eager": {}, "leanrl": {"failed": "it crashed"}}})
    assert readme.still_warming(results).startswith("LeanRL's `ppo` and `sac` had 2.0 and 1.5 times the speed")
    assert readme.still_warming(results[1:2]) == ""


def test_seeds_of_two_reports_are_pooled(monkeypatch):
    """Where one is named after the other and no seed is in both; five seeds have a verdict, which neither has alone."""
    monkeypatch.setattr(readme, "mark", lambda *words: " †" * ("old" in words[0]))

    def summary(name: str, seeds: list[int], **others) -> dict:
        row = {"script": "sac_continuous_action", "env_id": "HalfCheetah-v4", "variant": "compile", "published": None}
        row |= {"seeds": seeds, "scores": [1000.0 * seed for seed in seeds], "steps": 1_000_000, "iqm": 0.0}
        return {"file": f"learning/{name}/report.json", "rows": [row | {"interval": None} | others]}

    first, second = summary("million", [1, 2]), summary("million_b", [3, 4, 5])
    ((pool,), (cells,)) = (found := readme.pooled([first, second])), readme.learning_rows(found[0])
    assert pool["rows"][0]["iqm"] == 3000 and pool["rows"][0]["seeds"] == [1, 2, 3, 4, 5]
    assert "5 seeds, below" in cells[3] and cells[5].count("report.md") == 2
    for other in (
        summary("million_b", [2, 3, 4]),
        summary("other", [3, 4, 5]),
        summary("million_old", [3, 4, 5]),
        summary("million_b", [3, 4, 5], steps=200_000),
        summary("million_b", [3, 4, 5], settings={"learning_rate": 1e-3}),
        summary("million_b", [3, 4, 5], mixed=True),
        summary("million_b", [3, 4, 5], variant="compile --bf16"),
        summary("million_b", []),
    ):
        assert not readme.pooled([first, other])


def test_settings_stand_beside_a_row_as_flags():
    """Those that are in its variant's flags once."""
    settings = {"bf16": True, "learning_rate": 0.001, "anneal_lr": False, "num_envs": 64}
    flags = readme.with_settings("--bf16 --num-envs 64", {"settings": settings})
    assert flags == "--bf16 --num-envs 64 --learning-rate 0.001 --no-anneal-lr"
    assert readme.with_settings("--bf16", {"settings": None}) == readme.with_settings("--bf16", {}) == "--bf16"


def test_the_time_to_a_score_is_shown(tmp_path, monkeypatch):
    """A row for each task, a column for each contestant; without results there is nothing."""
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    assert readme.score_section() == []
    runs = [{"seed": i, "seconds": 10.0 * i, "reached": i < 3, "steps": 100} for i in (1, 2, 3)]
    result = {"script": "ppo", "env_id": "CartPole-v1", "score": 490.04, "flags": "", "provenance": provenance()}
    (tmp_path / "time_to_score").mkdir()
    text = json.dumps(result | {"contestants": {"eager": runs, "sb3": [{"failed": "exit code 1"}]}})
    (tmp_path / "time_to_score" / "ppo.json").write_text(text)
    header, _, row, *_ = readme.score_section()
    assert header.endswith("| score | eager | SB3 |")
    assert row == "| `ppo`, CartPole-v1 | 490.04 | 30 for each success, 2 of 3 | failed |"


def test_the_compiled_variant_of_a_gpu_has_graphs():
    names = ("eager", "compile")
    contestants = {name: {"steps_per_second": 100.0 * i, "failed": []} for i, name in enumerate(names, 1)}
    contestants["compile"]["failed"] = ["exit code 1"]
    contestants["compile+cudagraphs"] = {"steps_per_second": 900.0, "cold_seconds": 30.0, "warm_seconds": 9.0}
    contestants["compile+cudagraphs"]["failed"] = []
    ratios = [{"of": "compile+cudagraphs", "to": "eager", "ratio": 9.0, "interval": [8.9, 9.1]}]
    result = {"script": "ppo", "env_id": "CartPole-v1", "flags": "", "contestants": contestants, "ratios": ratios}
    result |= {"rounds": 3, "provenance": {"date": "2026-11-24 08:00 UTC"}}
    row = readme.speed_row(result)
    assert row[1:3] == ["2026-11-24", "3, 1 failed runs"] and row[5:7] == ["100", "900"]
    assert row[11:13] == ["9.00 [8.90, 9.10]", "30 / 9"]
    row = readme.speed_row(result | {"contestants": {"eager": contestants["eager"]}})
    assert (row[2], row[6]) == ("3", "-")


def test_searches_that_differ_by_their_seed_are_one_row(tmp_path, monkeypatch):
    search = {"script": "ppo", "env_id": "CartPole-v1", "search": ["gamma=[0.9,0.99]"], "perturb": ["gamma=*1.1"]}
    search |= {"scheduler": "pbt", "population": 4, "trials": 20, "total_timesteps": 1000, "seeds_per_trial": 1}
    check = {"difference": 80.0, "interval": [60.0, 95.0]}
    results_of = [("pbt", 1, 400, {}), ("pbt", 2, 440, {}), ("none", 1, 300, {"check": check})]
    (tmp_path / "tune").mkdir()
    for scheduler, seed, best, more in results_of:
        result = {"search": search | {"scheduler": scheduler, "search_seed": seed}, "steps": 2000 * seed} | more
        result |= {"best": {"objective": best}, "provenance": provenance()}
        (tmp_path / "tune" / f"{scheduler}_{seed}.json").write_text(json.dumps(result))
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    rows = [line.split(" | ")[2:] for line in readme.search_section()[2:4]]
    alone, population = rows
    assert alone == ["none", "20 of 1,000 steps", "1", "300", "10%", "80 [60, 95] |"]
    assert population == ["pbt", "4 of 1,000 steps", "2", "400 to 440", "75%", "- |"]


def test_the_overview_is_of_default_flags_and_of_what_is_fresh(tmp_path, monkeypatch):
    """What was measured with flags is in neither half, nor a time by older code."""
    source, drawn = provenance() | {"date": "2026-01-01"}, []
    for name, flags, speed in (("a", "", 200.0), ("b", "--num-envs 8", 900.0)):
        speeds = {"eager": speed, "sb3": 100.0}
        own = {key: {"steps_per_second": x, "rounds": [{"speeds": [x, x]}]} for key, x in speeds.items()}
        result = {"script": "ppo", "env_id": "CartPole-v1", "flags": flags, "provenance": source, "contestants": own}
        results.make_folder(tmp_path / "throughput")
        results.write_json(tmp_path / "throughput" / f"{name}.json", result)
    for name, seconds in (("fresh", 10.0), ("old", 99.0)):
        runs_of = [{"seed": 1, "reached": True, "seconds": seconds, "steps": 1}] * 2
        result = {"script": "ppo", "env_id": "CartPole-v1", "score": 1, "provenance": source}
        result["contestants"] = {"eager": runs_of, "sb3": [runs_of[0] | {"seconds": 100.0}]}
        results.make_folder(tmp_path / "time_to_score")
        results.write_json(tmp_path / "time_to_score" / f"{name}.json", result)
    results.write_json(tmp_path / "noted.json", {"time_to_score/old.json": ["ppo.py has changed"]})
    monkeypatch.setattr(readme, "NOTED", tmp_path / "noted.json")
    monkeypatch.setattr(readme.plots, "draw_groups", lambda _axis, groups, _form: drawn.append(groups))
    readme.draw_overview(tmp_path)
    assert drawn[0]["ppo\nCartPole-v1"]["eager"][0] == pytest.approx(2)
    assert drawn[1]["ppo\nCartPole-v1 to 1"]["eager"][0] == pytest.approx(10)


def test_a_mean_over_runs_that_did_not_all_get_there_is_for_each_that_did():
    known = [{"seed": i, "seconds": 10.0 * i, "reached": True, "steps": 100} for i in (1, 2, 3, 4, 5)]
    assert readme.score_cell(known) == "30 [10, 50], 5 of 5"
    assert readme.score_cell([*known, {"failed": "exit code 1", "reached": False}]) == "30 for each success, 5 of 6"
    late = {"seed": 6, "seconds": 60.0, "reached": False, "steps": 100}
    assert readme.score_cell([*known, late]) == "42 for each success, 5 of 6"
    assert readme.score_cell([late, late]) == "never within 60, 0 of 2"
    assert readme.score_cell(known[:4]) == "25, 4 of 4"  # too few for an interval


def test_the_share_of_a_search_is_of_all_its_seeds(tmp_path, monkeypatch):
    search = {"script": "ppo", "env_id": "CartPole-v1", "search": ["gamma=[0.9,0.99]"], "perturb": [], "trials": 10}
    search |= {"scheduler": "none", "population": 4, "total_timesteps": 1000, "seeds_per_trial": 2, "search_seed": 1}
    (tmp_path / "tune").mkdir()
    text = json.dumps({"search": search, "steps": 5000, "best": {"objective": 1.0}, "provenance": provenance()})
    (tmp_path / "tune" / "a.json").write_text(text)
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    assert "| 25% |" in readme.search_section()[2]


def test_reports_whose_seconds_measure_no_speed_are_named():
    """In the notes of RESULTS.md; the code leaves out their tables by seconds."""
    notes = (ROOT / "RESULTS.md").read_text().partition("**Minutes and seconds.**")[2].partition("- **Means.**")[0]
    named = set(re.findall(r"`(\w+)`", notes.partition("They have no tables")[0]))
    assert named | {"off_policy_million_zen_4"} == set(readme.BUSY)  # that one in words: SAC's million steps


def test_times_to_a_score_are_drawn_as_multiples_of_sb3(monkeypatch):
    """By the seconds for each run that got there; without a task on which SB3 did, nothing."""
    drawn = []
    monkeypatch.setattr(readme.plots, "draw_groups", lambda _axis, groups, _form: drawn.append(groups))
    monkeypatch.setattr(readme.plots, "describe_axis", lambda *_: None)
    one = {"seed": 1, "seconds": 10.0, "reached": True, "steps": 100}
    never = one | {"reached": False}
    task = {"script": "a", "env_id": "b", "score": 475.0, "provenance": provenance()}
    rows = {"eager": [one] * 5, "compile": [never] * 5, "sb3": [one, one, one, one, never], "sbx": [one]}
    without = task | {"env_id": "c", "contestants": {"eager": [one], "sb3": [never]}}
    readme.draw_times(mock.MagicMock(), [task | {"contestants": rows}, without])
    ((name, groups),) = drawn[0].items()
    assert name == "a\nb to 475" and list(groups) == ["eager", "sbx"]
    ratio, (low, high) = groups["eager"]
    assert ratio == pytest.approx(1.25) and low == pytest.approx(1) and 1.25 < high < np.inf
    assert groups["sbx"] == (pytest.approx(1.25), [pytest.approx(1.25)] * 2)  # one seed has no interval


def test_an_interval_without_an_upper_end_is_drawn_beyond_all_others():
    """As where one of five got to the score: a line that ended at the bar would look certain."""
    one = {"seed": 1, "seconds": 10.0, "reached": True, "steps": 100}
    ratio, ends = time_to_score.beside([one] * 5, [one] + [one | {"reached": False}] * 4)
    assert ratio == pytest.approx(5) and ends[1] == np.inf
    axis = mock.MagicMock()
    readme.plots.draw_groups(axis, {"a": {"eager": (ratio, ends)}, "b": {"eager": (1.0, [0.5, 8.0])}})
    _, above = axis.errorbar.call_args.kwargs["xerr"]
    assert above == pytest.approx([10 - 5, 8 - 1])


def test_whole_runs_are_shown_by_machine_in_seconds():
    """Of what was timed; a result without whole runs has no row, and without any there is no table."""

    def result(script: str, **seconds: float) -> dict:
        whole = {name: {"whole": {"steps": 2000, "seconds": x}} for name, x in seconds.items()}
        contestants = {"eager": {}, "compile": {"whole": {"failed": "no end after 9 s"}}, **whole}
        if "sbx" in whole:
            whole["sbx"]["whole"]["rounds"] = [50.2, 51, 1060]
        own = {"script": script, "env_id": "CartPole-v1", "flags": "", "contestants": contestants}
        return own | {"provenance": provenance(), "file": "throughput/none.json"}

    ppo = result("ppo", eager=12.4, compile=7.6, sb3=81, sbx=51)
    lines = readme.whole_runs([ppo, result("dqn"), result("sac", eager=3)])
    assert lines[0] == f"| seconds of a whole run, {machine_of(provenance())} | steps | SB3 | SBX | eager | compiled |"
    assert lines[2:4] == [
        "| `ppo`, CartPole-v1 | 2,000 | 81 | 51 (50 to 1,060) | 12 | 8 |",
        "| `sac`, CartPole-v1 | 2,000 | - | - | 3 | - |",
    ]
    assert not readme.whole_runs([result("dqn")])


def test_lengths_of_scripts_in_the_readme_are_theirs():
    """Above the rule; below it, in eager files; and what the compiled files have more."""
    text, parts = " ".join((ROOT / "README.md").read_text().split()), {}
    for path in SCRIPTS.glob("*.py"):
        above, _, below = path.read_text().partition("\n# ---- Plumbing")
        parts[path.stem] = above.count("\n") + 1, below.count("\n")
    least = sorted(above for above, _ in parts.values())[:: len(parts) - 1]
    most = sorted(below for name, (_, below) in parts.items() if "_t" not in name)[:: len(parts) // 2 - 1]
    (said,) = re.findall(r"in (\d+) to (\d+) lines: .* Below are (\d+) to ([\d,]+) lines of plumbing", text)
    assert [int(x.replace(",", "")) for x in said] == [*least, *most]
    more = [below - parts[name.removesuffix("_torchcompile")][1] for name, (_, below) in parts.items() if "_t" in name]
    assert "compiled files add 350 to 440, mostly checks" in text and all(350 <= x <= 440 for x in more)
