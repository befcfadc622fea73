"""The table of pairs: what tests and benchmarks must know about a pair and can't read from its scripts.

A new pair consists of its two scripts and an entry here; a test names pairs without an entry. Environments named
`tiny_envs:...` are in tests/tiny_envs.py. Pairs get time on a GPU in the order of the table: the most telling first.
"""

from dataclasses import dataclass, field
from typing import Any

Settings = dict[str, Any]  # fields of a script's Args


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One pair. If it has tests of its own, the fields that only the common tests need may be left out."""

    takes: tuple[str, ...] = ("Discrete", "Box")  # the spaces of actions that it can learn, by Gymnasium's names
    # How it acts in its default environment, unless another pair acts in the same way: a class of acting/networks.py,
    # the shape of an observation (bytes if it is an image), and the number of actions or of their dimensions
    acts: str | None = None
    obs_shape: tuple[int, ...] = ()
    num_actions: int = 0
    # `peers`: its algorithm in throughput/peers.py, if other libraries can train it. `clones`: which of CleanRL and
    # LeanRL have a script like it that runs in the environment of requirements-cleanrl.txt. `leanrl`: LeanRL's steps/s
    # on one H100. `scored`: environments on which to time how long CleanRL's score takes; they must be in
    # benchmarks/reference/scores.csv. `scores_of`: differently named CleanRL scripts that score the same algorithm
    peers: str | None = None
    clones: tuple[str, ...] = ()
    leanrl: dict[str, int] = field(default_factory=dict)
    scored: tuple[str, ...] = ()
    scores_of: tuple[str, ...] = ()

    # The file of its tests, if it does not fit the common ones, which need all of the following:
    own_tests: str | None = None
    small: Settings = field(default_factory=dict)  # a run of about a second that learns
    stream: Settings = field(default_factory=dict)  # a whole run in which actions do not affect the observations
    shows: dict[str, float] = field(default_factory=dict)  # settings, each with a factor whose effect tests must notice
    compiled_with: tuple[Settings, ...] = ()  # settings with which a different graph is compiled
    learns_with: tuple[Settings, ...] = ()  # further settings that must get past the first update
    launches: tuple[int, ...] = ()  # kernels of each CUDA graph, in the order in which the script makes the graphs
    task: Settings = field(default_factory=dict)  # a short run that learns to reach `goal`
    goal: tuple[float, float] = (0.0, 0.0)  # the return of doing nothing or acting at random, and the one to reach
    learn_value: Settings | None = None  # a run that learns the value of the only state of `tiny_envs:Same`

    # Limits in tests/test_scripts_agree.py, raised where there is a reason, and names whose text differs in this pair
    most_changes: int = 25  # lines above the rule in which its two scripts differ
    most_above: int = 360  # lines above the rule
    most_lines: int = 1710  # lines in total, without the functions that only compiled files have
    own_texts: tuple[str, ...] = ()


SEVERAL = {"num_envs": 3, "sync_envs": True}
MANY = {"num_envs": 16, "sync_envs": True}
REACH, CHOOSE = {"env_id": "tiny_envs:Reach-v0"}, {"env_id": "tiny_envs:Choose-v0"}
STREAM, DISCRETE_STREAM = {"env_id": "tiny_envs:Stream-v0"}, {"env_id": "tiny_envs:DiscreteStream-v0"}
ON_POLICY = {
    "num_steps": 64, "num_minibatches": 4, "update_epochs": 4, "learning_rate": 3e-3, "total_timesteps": 384,
}  # fmt: skip
OFF_POLICY = {"total_timesteps": 400, "learning_starts": 100, "buffer_size": 250, "batch_size": 16, "log_every": 50}
# One worker, forked: it inherits what a test has changed in its process, and starts instantly
POOL = {"num_workers": 1, "ready_batch": 0, "start_method": "fork"}
# With these SAC and TD3 learn quickly
FAST = {"gamma": 0.9, "tau": 0.02}
# Whole runs: learning rates are annealed, a replay buffer is overwritten, a target network moves
ON_POLICY_STREAM = {"total_timesteps": 24 * 64}
OFF_POLICY_STREAM = {"total_timesteps": 390, "log_every": 30}
ACTOR_LEARNS = {"policy_frequency": 1}, {"policy_frequency": 3}, MANY
CARTPOLE = {
    "env_id": "CartPole-v1", "total_timesteps": 20480, "num_steps": 128, "update_epochs": 4, "learning_rate": 1e-3,
}  # fmt: skip
PENDULUM = FAST | {"env_id": "Pendulum-v1", "learning_starts": 300, "buffer_size": 10000, "batch_size": 64}
PPO_VALUE = {
    "num_steps": 64, "total_timesteps": 64 * 40, "num_minibatches": 4, "update_epochs": 5, "learning_rate": 3e-3,
    "anneal_lr": False, "clip_vloss": False, "max_grad_norm": 10.0,
}  # fmt: skip
OFF_POLICY_VALUE = {"total_timesteps": 1500, "learning_starts": 100, "buffer_size": 2000}

TABLE = {
    "ppo_continuous_action": Pair(
        takes=("Box",),
        acts="Gaussian", obs_shape=(17,), num_actions=6, peers="ppo",
        clones=("cleanrl", "leanrl"),
        leanrl={"CleanRL": 652, "eager": 683, "compile": 908, "compile+cudagraphs": 1774},
        scored=("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4"),
        small=REACH | {"num_envs": 1} | ON_POLICY,
        stream=STREAM | ON_POLICY_STREAM,
        shows={"gamma": 0.99, "clip_coef": 0.99},
        compiled_with=({"norm_adv": False, "ent_coef": 0.01},),
        launches=(92, 794),
        task={"env_id": "InvertedPendulum-v5", "total_timesteps": 20480, "num_steps": 512, "num_minibatches": 8,
              "update_epochs": 10, "learning_rate": 1e-3},
        goal=(30, 500),
        learn_value=PPO_VALUE,
    ),
    "sac_continuous_action": Pair(
        takes=("Box",),
        acts="SquashedGaussian", obs_shape=(17,), num_actions=6, peers="sac",
        clones=("cleanrl", "leanrl"),
        leanrl={"CleanRL": 127, "eager": 130, "compile": 255, "compile+cudagraphs": 725},
        scored=("HalfCheetah-v4",),
        small=REACH | OFF_POLICY | FAST,
        stream=STREAM | OFF_POLICY_STREAM,
        shows={"gamma": 0.99, "policy_frequency": 1.5},
        compiled_with=(
            {"autotune": False, "policy_frequency": 3, "target_network_frequency": 2, **SEVERAL},
            {"policy_frequency": 1},
        ),
        learns_with=(
            {"autotune": False, "alpha": 0.1}, {"target_network_frequency": 2}, {"matmul_precision": "medium"},
            *ACTOR_LEARNS,
        ),
        launches=(28, 98, 311),
        task=PENDULUM | {"total_timesteps": 4000, "policy_lr": 3e-3, "q_lr": 3e-3},
        goal=(-1200, -250),
        learn_value=OFF_POLICY_VALUE | {"tau": 0.2, "autotune": False, "alpha": 1e-3, "total_timesteps": 600,
                                         "batch_size": 64},
        most_changes=35,  # the critics are stacked
    ),
    "td3_continuous_action": Pair(
        takes=("Box",),
        acts="Deterministic", obs_shape=(17,), num_actions=6, peers="td3",
        clones=("cleanrl", "leanrl"),
        leanrl={"CleanRL": 272, "eager": 247, "compile": 272, "compile+cudagraphs": 936},
        scored=("HalfCheetah-v4",),
        small=REACH | OFF_POLICY | FAST,
        stream=STREAM | OFF_POLICY_STREAM,
        shows={"tau": 1.01, "policy_noise": 1.01},
        compiled_with=({"policy_frequency": 3, **SEVERAL},),
        learns_with=ACTOR_LEARNS,
        launches=(15, 77, 127),
        task=PENDULUM | {"total_timesteps": 3500, "learning_rate": 2e-3, "exploration_noise": 0.3},
        goal=(-1200, -250),
        learn_value=OFF_POLICY_VALUE | {"tau": 0.4, "learning_rate": 1e-3, "total_timesteps": 600, "batch_size": 64},
        most_lines=1655,  # transfers to and from a device
        most_changes=35,  # the critics are stacked
    ),
    "ppo_atari_envpool": Pair(
        takes=("Discrete",),
        acts="Categorical", obs_shape=(21, 21, 64), num_actions=4, peers="ppo",
        leanrl={"CleanRL": 1022, "eager": 3728, "compile": 3841, "compile+cudagraphs": 6809},
        own_tests="test_atari.py",
        most_above=420,
        own_texts=("Envs",),  # games are stepped in pools and observed as stacks of frames
    ),
    "dqn": Pair(
        takes=("Discrete",),
        acts="EpsilonGreedy", obs_shape=(4,), num_actions=2, peers="dqn",
        clones=("cleanrl", "leanrl"),
        scored=("CartPole-v1", "Acrobot-v1"),
        small=CHOOSE | {"train_frequency": 5, "target_network_frequency": 50} | OFF_POLICY,
        stream=DISCRETE_STREAM | OFF_POLICY_STREAM,
        shows={"gamma": 0.99, "target_network_frequency": 2},
        compiled_with=({"double_dqn": True, "tau": 0.5, **SEVERAL},),
        learns_with=({"double_dqn": True}, {"tau": 0.3}),
        launches=(47,),
        task={"env_id": "CartPole-v1", "total_timesteps": 20000, "learning_starts": 1000, "buffer_size": 10000,
              "batch_size": 128, "train_frequency": 2, "target_network_frequency": 200, "learning_rate": 5e-4,
              "exploration_fraction": 0.2, "gamma": 0.98},
        goal=(30, 195),
        learn_value=OFF_POLICY_VALUE | {"train_frequency": 1, "target_network_frequency": 25, "learning_rate": 3e-3},
    ),
    "ppo": Pair(
        takes=("Discrete",),
        acts="Categorical", obs_shape=(4,), num_actions=2, peers="ppo", clones=("cleanrl",),
        scored=("CartPole-v1", "Acrobot-v1"),
        small=CHOOSE | {"num_envs": 1} | ON_POLICY,
        stream=DISCRETE_STREAM | ON_POLICY_STREAM,
        shows={"clip_coef": 0.99},
        compiled_with=({**SEVERAL, "clip_vloss": False, "total_timesteps": 8 * 192},),
        launches=(86, 786),
        task=CARTPOLE | {"num_envs": 4},
        goal=(30, 200),
        learn_value=PPO_VALUE,
    ),
    "ppo_env_pool": Pair(
        acts="PooledCategorical", obs_shape=(4,), num_actions=2,
        small=REACH | POOL | ON_POLICY,
        stream=STREAM | ON_POLICY_STREAM,
        shows={"clip_coef": 0.99},
        compiled_with=({**DISCRETE_STREAM, "num_envs": 2, "target_kl": 0.02},),
        launches=(95, 826),
        task=CARTPOLE | {"num_workers": 4, "ready_batch": 2},
        goal=(30, 200),
        learn_value=PPO_VALUE,
        most_above=410,
        most_lines=1808,
    ),
    "impala_ray": Pair(
        peers="impala",  # it acts as ppo does
        own_tests="test_impala.py",
        task={"env_id": "CartPole-v1", "total_timesteps": 150_000, "num_runners": 0, "batch_updates": 8,
              "learning_rate": 2e-3, "ent_coef": 0.01, "log_every": 1000},
        goal=(30, 200),
        most_above=442,  # V-trace, and stretches
        most_lines=2538,  # runners and learners of Ray
        own_texts=("warn_of_pixels",),  # it has convolutions for them
    ),
    "ppo_ray": Pair(
        peers="ppo",  # it acts as ppo does
        scores_of=("ppo", "ppo_continuous_action", "ppo_atari_envpool"),
        own_tests="test_ppo_ray.py",
        task=CARTPOLE | {"num_runners": 0},
        goal=(30, 200),
        most_changes=27,  # a minibatch update is one function, or two with a sum over learners in between
        most_above=440,
        most_lines=2769,  # runners and learners of Ray, environments that do not wait for each other
        own_texts=("warn_of_pixels",),  # it has convolutions for them
    ),
    "apex_dqn_ray": Pair(
        takes=("Discrete",),
        peers="dqn",  # it acts as dqn does
        own_tests="test_apex.py",
        task={"env_id": "CartPole-v1", "total_timesteps": 80_000, "num_runners": 0, "fragment_steps": 16, "gamma": 0.98,
              "learning_starts": 1000, "buffer_size": 20_000, "batch_size": 128, "samples_per_insert": 12.8,
              "target_network_frequency": 200, "learning_rate": 1e-3, "log_every": 1000},
        goal=(30, 120),
        most_above=431,
        most_lines=2750,  # runners and replay shards on Ray
        own_texts=("Runner", "check_actions", "warn_of_pixels"),  # epsilons, n-step returns; it has convolutions
    ),
    "a3c_ray": Pair(  # it acts as ppo does
        own_tests="test_a3c.py",
        task={"env_id": "CartPole-v1", "total_timesteps": 120_000, "num_runners": 0, "learning_rate": 3e-3,
              "log_every": 1000},
        goal=(30, 200),
        most_changes=31,  # a runner's half and the learner's are compiled apart
        most_above=428,
        most_lines=2388,  # runners of Ray
        own_texts=("Runner", "warn_of_pixels"),  # gradients; it has convolutions for pixels
    ),
}  # fmt: skip
