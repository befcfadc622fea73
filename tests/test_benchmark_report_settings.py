"""./run.sh report on runs of several settings, and on folders that hold no run."""

import json

import pytest
from benchmark_helpers import benchmark, make_line, make_run, refusal

from benchmarks.common import plots
from benchmarks.learning import report

COMPILED = {"script": "ppo_torchcompile.py"}


@pytest.fixture
def make(tmp_path):
    """Makes a run of PPO with some settings, of 1000 steps and a hundred episodes."""

    def make_one(name: str, score: float = 20.0, seed: int = 1, script: str = "ppo.py", total: int = 1000, **args):
        flags = {"compile": True, "cudagraphs": True} if "torchcompile" in script else {}
        lines = [make_line(total * i // 10, score, 10) for i in range(1, 11)]
        return make_run(tmp_path / name, lines, seed=seed, script=script, total=total, args=flags | args)

    return make_one


def reported(tmp_path, *names: str, out: str = "out") -> tuple[dict, str]:
    """What is in the report of these folders, or of all, as data and as Markdown."""
    result = report.write_report([tmp_path / name for name in names] or [tmp_path], tmp_path / out)
    return result, (tmp_path / out / "report.md").read_text()


def variants(result: dict) -> list[tuple[str, list[int]]]:
    return [(row["variant"], row["seeds"]) for row in result["rows"]]


@pytest.mark.parametrize("seed", [1, 2])
def test_two_settings_are_two_rows(make, tmp_path, seed):
    """Whether the seed is the same or not; curves, panels and scores on the way have both, by the same names."""
    make("ga", 23.0, gamma=0.9, exp_name="first", run_dir="ga")
    make("gb", 24.0, seed=seed, gamma=0.99, exp_name="second", run_dir="gb")
    result, text = reported(tmp_path)
    assert variants(result) == [("eager --gamma 0.9", [1]), ("eager --gamma 0.99", [seed])]
    assert [row["mean"] for row in result["rows"]] == [23, 24]
    assert [row["differing"] for row in result["rows"]] == [{"gamma": 0.9}, {"gamma": 0.99}]
    assert "Left out" not in text and "differ in their settings" not in text
    assert "| `ppo`, eager --gamma 0.99 | 1 | 24 |" in text
    panels = report.unpack_curves((tmp_path / "out" / "curves.json.gz").read_bytes())
    assert list(panels["ppo", "CartPole-v1"]) == ["eager --gamma 0.9", "eager --gamma 0.99"]


def test_seeds_of_one_setting_share_a_row(make, tmp_path):
    for seed in (1, 2, 3):
        make(f"a{seed}", seed=seed, gamma=0.9, clip_coef=0.3)
        make(f"b{seed}", seed=seed, gamma=0.99, clip_coef=0.3)
    make("short", seed=1, gamma=0.9, clip_coef=0.3)
    (tmp_path / "short" / "metrics.jsonl").write_text(json.dumps(make_line(100, 1.0, 1)) + "\n")
    result, text = reported(tmp_path)
    assert variants(result) == [("eager --gamma 0.9", [1, 2, 3]), ("eager --gamma 0.99", [1, 2, 3])]
    assert "short: ended after 100 of 1,000 steps" in text and "all with clip_coef = 0.3, gamma = 0.9" in text


def test_what_only_names_a_run_or_says_how_long_it_is_makes_no_row(make, tmp_path):
    make("a", seed=1, exp_name="a", checkpoint_every=10, wandb_entity="me", wandb_project_name="a", device="auto")
    make("b", seed=2, exp_name="b", checkpoint_every=20, wandb_entity="we", wandb_project_name="b", device="cpu")
    make("c", seed=3, total=2000, save_replay=True, ray_address="auto", override=["gamma=0.9"], tensorboard=False)
    result, _ = reported(tmp_path)
    assert variants(result) == [("eager", [1, 2, 3])]
    assert result["rows"][0]["mixed"]  # of other lengths and on other devices, as was always said
    (tmp_path / "c" / "config.json").unlink()
    make("d", seed=3, ray_address="auto", override=["gamma=0.9"], track=True, device="auto")
    make("e", seed=4, wandb_entity="me", wandb_project_name="e", device="auto")
    (row,) = reported(tmp_path, "a", "d", "e")[0]["rows"]
    assert row["seeds"] == [1, 3, 4] and "mixed" not in row and row["notes"] == []
    assert row["settings"] == {}


def test_settings_that_a_run_does_not_have_are_the_defaults(make, tmp_path):
    """As of a run that is older than the flag; a setting that no script has any more says nothing."""
    make("old", seed=1, of_old=3)
    make("new", seed=2, gamma=0.99, env_kwargs="{}", target_kl=None)
    result, _ = reported(tmp_path)
    assert variants(result) == [("eager", [1, 2])]
    make("other", seed=3, gamma=0.9)
    result, _ = reported(tmp_path)
    assert variants(result) == [("eager --gamma 0.9", [3]), ("eager --gamma 0.99", [1, 2])]


def test_a_label_is_made_of_flags(make, tmp_path):
    """In the order of the values, as numbers; switches, words and JSON as they are typed."""
    make("a", learning_rate=0.001, norm_adv=True, env_kwargs='{"a": 1}')
    make("b", learning_rate=0.01, norm_adv=False, env_kwargs="{}", target_kl=None)
    make("c", learning_rate=0.00025, norm_adv=True, env_kwargs="{}", target_kl=0.1)
    assert [name for name, _ in variants(reported(tmp_path)[0])] == [
        "eager --learning-rate 0.00025 --norm-adv --env-kwargs '{}' --target-kl 0.1",
        "eager --learning-rate 0.001 --norm-adv --env-kwargs '{\"a\": 1}' --target-kl None",
        "eager --learning-rate 0.01 --no-norm-adv --env-kwargs '{}' --target-kl None",
    ]


def test_flags_that_made_a_row_before_come_first(make, tmp_path):
    """Precision and numbers of environments, each of them said once."""
    make("a", num_envs=4, gamma=0.9, bf16=True)
    make("b", num_envs=8, gamma=0.99)
    found = variants(reported(tmp_path)[0])
    assert found == [("eager --num-envs 8 --gamma 0.99", [1]), ("eager --bf16 --num-envs 4 --gamma 0.9", [1])]


def test_settings_that_a_resumed_run_changed_make_a_row(make, tmp_path):
    changed = make("changed", gamma=0.99) / "config.json"
    part = {"global_step": 500, "commit": "c0ffee", "changed": {"gamma": 0.9, "resume": "changed"}}
    changed.write_text(json.dumps(json.loads(changed.read_text()) | {"resumed": [part]}))
    make("plain", gamma=0.99)
    assert variants(reported(tmp_path)[0]) == [("eager --gamma 0.9", [1]), ("eager --gamma 0.99", [1])]


def test_settings_are_compared_within_a_script_and_environment(make, tmp_path):
    make("ppo", gamma=0.9)
    make("dqn", gamma=0.99, script="dqn.py")
    make("other", gamma=0.95, env_id="Acrobot-v1")
    assert [name for name, _ in variants(reported(tmp_path)[0])] == ["eager"] * 3


def test_eager_and_compiled_are_paired_by_their_settings(make, tmp_path):
    """Two of other settings are a pair, too, if neither has a partner of its own; such a pair gets no verdict."""
    for gamma in (0.9, 0.99):
        make(f"e{gamma}", 10 * gamma, gamma=gamma)
        make(f"c{gamma}", 10 * gamma + 1, gamma=gamma, **COMPILED)
    pairs = reported(tmp_path)[0]["pairs"]
    names = [(f"eager --gamma {x}", f"compile --gamma {x}") for x in (0.9, 0.99)]
    assert [(pair["eager"], pair["compiled"]) for pair in pairs] == names
    assert [pair["difference"] for pair in pairs] == pytest.approx([1, 1]) and "mixed" not in str(pairs)
    (pair,) = reported(tmp_path, "e0.9", "e0.99", "c0.99", out="three")[0]["pairs"]
    assert (pair["eager"], pair["compiled"], "mixed" in pair) == (*names[1], False)
    (pair,) = reported(tmp_path, "e0.9", "c0.99", out="two")[0]["pairs"]
    assert (pair["eager"], pair["compiled"], pair["mixed"]) == ("eager --gamma 0.9", "compile --gamma 0.99", True)


MANY = {"gamma": 0.9, "gae_lambda": 0.9, "clip_coef": 0.3, "ent_coef": 0.0, "vf_coef": 0.7}


def test_many_settings_get_a_short_name(make, tmp_path):
    """That of the experiment if it tells the groups apart, else what the names of their folders begin with."""
    for seed in (1, 2):
        make(f"plain_{seed}", seed=seed, exp_name="usual")
        make(f"compiled_{seed}", seed=seed, exp_name="usual", **COMPILED)
        make(f"mine_{seed}", seed=seed, exp_name="new", **MANY)
    result, text = reported(tmp_path)
    assert variants(result) == [("eager (new)", [1, 2]), ("eager (usual)", [1, 2]), ("compile (usual)", [1, 2])]
    stands = "(new) stands for --gamma 0.9 --gae-lambda 0.9 --clip-coef 0.3 --ent-coef 0.0 --vf-coef 0.7"
    assert f"ppo, CartPole-v1, eager (new): {stands}" in text
    assert [(x["eager"], x["compiled"]) for x in result["pairs"]] == [("eager (usual)", "compile (usual)")]


def test_short_names_are_those_of_folders_or_numbers(make, tmp_path):
    for seed in (1, 2):
        make(f"plain_{seed}", seed=seed)
        make(f"mine_{seed}", seed=seed, **MANY)
        make(f"a/{seed}", seed=seed, env_id="Acrobot-v1")
        make(f"b/{seed}", seed=seed, env_id="Acrobot-v1", **MANY)
        for number in (0.1, 0.2):
            make(f"c/{seed}{number}", seed=seed, env_id="Pong-v5", **MANY | {"gamma": number})
            make(f"c/{seed}{number}x", seed=seed, env_id="Pong-v5", gamma=number)
    found = [(row["env_id"], row["variant"]) for row in reported(tmp_path)[0]["rows"]]
    names = {"Acrobot-v1": ["b", "a"], "CartPole-v1": ["mine", "plain"]}
    names["Pong-v5"] = [f"settings {number}" for number in (1, 2, 3, 4)]
    assert found == [(env_id, f"eager ({name})") for env_id, own in names.items() for name in own]


def test_a_repeat_is_left_out_and_says_of_what(make, tmp_path):
    make("ga", gamma=0.9)
    make("gb", gamma=0.9, exp_name="again")
    make("deep/gc", gamma=0.9, seed=2)
    make("deep/er/gc", gamma=0.9, seed=2)
    make("long", gamma=0.9, seed=3, total=2000)
    make("short", gamma=0.9, seed=3)
    result, text = reported(tmp_path)
    assert variants(result) == [("eager", [1, 2, 3])]
    assert "- ppo, gb: seed 1 with the same settings is in ga\n" in text
    assert "- ppo, deep/gc: seed 2 with the same settings is in er/gc\n" in text
    assert "- ppo, short: seed 3, with another total_timesteps, is in long\n" in text


def test_a_report_may_get_more_settings_but_not_fewer_runs(make, tmp_path, capsys):
    """A row's label is longer when another setting joins it; it is still the same row."""
    for seed in (1, 2):
        make(f"a{seed}", seed=seed, gamma=0.9)
        make(f"b{seed}", seed=seed, gamma=0.99)
    reported(tmp_path, "a1", "a2")
    reported(tmp_path)
    reported(tmp_path)
    error = refusal(lambda names: reported(tmp_path, *names), ("a1", "a2"), capsys)
    assert "has 4 runs of ppo on CartPole-v1 (eager), yours 2" in error
    make("b3", seed=3, gamma=0.99)
    error = refusal(lambda names: reported(tmp_path, *names), ("a1", "b1", "b2", "b3"), capsys)
    assert "has 2 runs of ppo on CartPole-v1 (eager --gamma 0.9), yours 1: give" in error


BROKEN, UNNAMED = "config.json is broken", "config.json names no script or no environment"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", BROKEN),
        ("[]", BROKEN),
        ('{"args": 3}', BROKEN),
        ("{}", UNNAMED),
        ('{"script": "ppo.py"}', UNNAMED),
        (None, "no config.json"),
    ],
)
def test_a_folder_that_holds_no_run_is_named_and_gets_no_row(make, tmp_path, text, why, capsys):
    broken = make("broken") / "config.json"
    broken.unlink() if text is None else broken.write_text(text)
    error = refusal(report.main, report.Options((tmp_path,), tmp_path / "out"), capsys)
    assert f"no run that can be read: broken: {why}" in error
    make("fine", seed=2)
    result, text = reported(tmp_path)
    assert variants(result) == [("eager", [2])] and result["left_out"] == [{"run": "broken", "why": why}]
    assert "unknown" not in text and f"- broken: {why}\n" in text
    assert "left_out" not in reported(tmp_path, "fine")[0]


def test_one_of_a_kind_is_said_as_one(tmp_path):
    make_run(tmp_path / "a", [make_line(500_000, 12.0, 1), "{broken\n"], total=500_000)
    result, text = reported(tmp_path)
    assert "| 12.0 | 12.0 | 490.0 ± 6.1 (3 seeds) |" in text and "± 0.0" not in text
    assert result["rows"][0]["notes"] == [
        "a: 1 broken line in metrics.jsonl",
        "a run has only 1 episode; its return is that of this one",
    ]


def test_a_score_of_a_single_run_has_no_deviation():
    row = {"script": "x", "env_id": "x", "variant": "eager", "seeds": [1], "steps": 1, "iqm": 7.0, "interval": None}
    row |= {"mean": 7.0, "std": 0.0, "scores": [7.0], "steps_per_second": 1.0, "minutes": 1.0}
    row["published"] = {"mean": 7100.0, "std": 0.0, "seeds": 1, "total_timesteps": 1000, "source": "CleanRL"}
    assert report.score_cells(row)[6:8] == ["7.0", "7,100.0 (1 seed)"]


def test_curves_of_several_settings_have_colours_of_their_own():
    """Also those of eager and compiled in one panel."""
    names = [f"{name} --gamma {gamma}" for name in ("eager", "compile") for gamma in (0.9, 0.99)]
    assert len(set(plots.shades([*names, "lean"]).values())) == 4
    assert plots.shades([names[0], *names[2:]]).keys() == set(names[2:])


@pytest.mark.parametrize(("count", "named"), [(8, range(8)), (40, (0, 39))])
def test_a_legend_has_room(make, tmp_path, monkeypatch, count, named):
    """Of many settings it has the first and the last; long names are wrapped."""
    found, legend = [], plots.legend

    def watched(axis, curves: int) -> None:
        legend(axis, curves)
        found.append([text.get_text() for text in axis.get_legend().get_texts()])

    monkeypatch.setattr(plots, "legend", watched)
    for i in range(count):
        make(f"{i}", gamma=0.5 + i / 100, clip_coef=0.1, env_kwargs=f'{{"a name of some length": {i}}}')
    reported(tmp_path)
    names = [f"eager --gamma {0.5 + i / 100} --env-kwargs" for i in named]
    assert [text.partition(" '")[0] for text in found[0]] == names
    assert all("\n" in text and max(map(len, text.splitlines())) <= 60 for text in found[0])


@pytest.mark.slow
def test_two_settings_are_compared_from_the_command_line(make, tmp_path):
    make("ga", 23.0, gamma=0.9)
    make("gb", 24.0, gamma=0.99)
    done = benchmark("report", tmp_path / "ga", tmp_path / "gb", "--out", tmp_path / "out")
    assert done.returncode == 0 and "| eager --gamma 0.99 | 1 |" in done.stdout, done.stderr
    (tmp_path / "ga" / "config.json").write_text("{")
    done = benchmark("report", tmp_path / "ga", "--out", tmp_path / "none")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "none").exists()
