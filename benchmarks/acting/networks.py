"""What each algorithm computes to act, as one function of observation and noise: action, log-probability, value.

The networks and their formulas are imported from the scripts. The noise is an argument, drawn beforehand as in the PPO
scripts, so that two ways to run a function can be compared number by number. Where acting involves no log-probability
or no value, the function returns only what there is.
"""

from collections.abc import Callable
from types import ModuleType

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common.pairs import TABLE
from benchmarks.common.programs import SCRIPTS, load_script

NO_NUMPY = "a CNN has no NumPy version"


def numpy_mlp(net: nn.Sequential) -> Callable[[np.ndarray], np.ndarray]:
    """The function of an MLP on NumPy arrays (B, inputs) -> (B, outputs), as PPO's script has it for collecting."""
    return load_script(SCRIPTS / "ppo.py").numpy_mlp(net)


def gumbel_noise(rows: int, columns: int) -> Tensor:
    """Noise (rows, columns) that makes the argmax of logits a sample of their softmax."""
    return -torch.empty(rows, columns).exponential_().log()


class Categorical(nn.Module):
    """PPO for discrete actions: observation (B, ...), Gumbel noise (B, A) -> action, log-prob. and value, each (B,)."""

    def __init__(self, script: ModuleType, obs_shape: tuple[int, ...], num_actions: int):
        super().__init__()
        self.num_actions, self.is_image = num_actions, len(obs_shape) != 1
        sizes = (num_actions,) if self.is_image else (*obs_shape, num_actions)  # a CNN's image size is fixed
        self.agent = script.ActorCritic(*sizes)

    def draw_noise(self, rows: int) -> Tensor:
        return gumbel_noise(rows, self.num_actions)

    def forward(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        log_probs, value = self.agent(obs)
        action = (log_probs + noise).argmax(1)
        return action, log_probs.gather(1, action.unsqueeze(1)).squeeze(1), value

    def in_numpy(self):
        """The same function of NumPy arrays."""
        if self.is_image:
            raise NotImplementedError(NO_NUMPY)
        actor, critic = numpy_mlp(self.agent.actor), numpy_mlp(self.agent.critic)

        def act(obs: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, ...]:
            logits = actor(obs)
            shifted = logits - logits.max(1, keepdims=True)
            action = (logits + noise).argmax(1)
            log_prob = shifted[np.arange(len(action)), action] - np.log(np.exp(shifted).sum(1))
            return action, log_prob, critic(obs)[:, 0]

        return act


class PooledCategorical(Categorical):
    """The same for PPO on a pool of environments, whose network takes an action and returns its log-probability."""

    def __init__(self, script: ModuleType, obs_shape: tuple[int, ...], num_actions: int):
        nn.Module.__init__(self)
        self.num_actions, self.is_image = num_actions, False
        self.agent = script.ActorCritic(*obs_shape, gym.spaces.Discrete(num_actions))

    def forward(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        output = self.agent.actor(obs)  # once: `forward` of the agent would compute it again
        action = (output + noise).argmax(1)
        return action, self.agent.log_prob(output, action), self.agent.critic(obs).squeeze(1)


class Gaussian(nn.Module):
    """PPO for continuous actions: observation (B, O), normal noise (B, A) -> action (B, A); log-prob., value (B,)."""

    def __init__(self, script: ModuleType, obs_shape: tuple[int, ...], action_dim: int):
        super().__init__()
        self.action_dim, self.script = action_dim, script
        self.agent = script.ActorCritic(*obs_shape, action_dim)

    def draw_noise(self, rows: int) -> Tensor:
        return torch.randn(rows, self.action_dim)

    def forward(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        mean, log_std, value = self.agent(obs)
        action = mean + noise * log_std.exp()
        return action, self.script.normal_log_prob(action, mean, log_std), value

    def in_numpy(self):
        actor, critic = numpy_mlp(self.agent.actor), numpy_mlp(self.agent.critic)
        log_std, constant = self.agent.log_std.detach().numpy(), np.float32(0.5 * np.log(2 * np.pi))

        def act(obs: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, ...]:
            log_prob = (np.float32(-0.5) * noise * noise - log_std - constant).sum(1)
            return actor(obs) + noise * np.exp(log_std), log_prob, critic(obs)[:, 0]

        return act


class EpsilonGreedy(nn.Module):
    """DQN at its final epsilon: observation (B, O), uniform noise (B, 1 + A) -> action and highest value, each (B,)."""

    def __init__(self, script: ModuleType, obs_shape: tuple[int, ...], num_actions: int):
        super().__init__()
        self.num_actions, self.epsilon = num_actions, script.Args().epsilon_end
        self.network = script.QNetwork(*obs_shape, num_actions)

    def draw_noise(self, rows: int) -> Tensor:
        return torch.rand(rows, 1 + self.num_actions)

    def forward(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        q = self.network(obs)
        return torch.where(noise[:, :1] < self.epsilon, noise[:, 1:], q).argmax(1), q.amax(1)

    def in_numpy(self):
        q_values = numpy_mlp(self.network.net)

        def act(obs: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, ...]:
            q = q_values(obs)
            return np.where(noise[:, :1] < self.epsilon, noise[:, 1:], q).argmax(1), q.max(1)

        return act


class SquashedGaussian(nn.Module):
    """SAC: observation (B, O), normal noise (B, A) -> action (B, A), its log-probability (B,)."""

    def __init__(self, script: ModuleType, obs_shape: tuple[int, ...], action_dim: int):
        super().__init__()
        self.action_dim, self.script = action_dim, script
        self.actor = script.Actor(*obs_shape, gym.spaces.Box(-1, 1, (action_dim,)))

    def draw_noise(self, rows: int) -> Tensor:
        return torch.randn(rows, self.action_dim)

    def forward(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        mean, log_std = self.actor(obs)
        x = mean + log_std.exp() * noise
        log_prob = self.script.squashed_log_prob(x, noise, log_std, self.actor.scale)
        return self.actor.center + self.actor.scale * x.tanh(), log_prob

    def in_numpy(self):
        net = numpy_mlp(self.actor.net)
        center, scale, constant = (
            self.actor.center.numpy(),
            self.actor.scale.numpy(),
            np.float32(0.5 * np.log(2 * np.pi)),
        )

        def act(obs: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, ...]:
            mean, squashed_log_std = np.split(net(obs), 2, axis=1)
            log_std = np.float32(3.5) * (np.tanh(squashed_log_std) + 1) - 5
            x = mean + np.exp(log_std) * noise
            squash = 2 * (np.float32(np.log(2)) - x - np.logaddexp(np.float32(0), -2 * x)) + np.log(scale)
            log_prob = (np.float32(-0.5) * noise * noise - log_std - constant - squash).sum(1)
            return center + scale * np.tanh(x), log_prob

        return act


class Deterministic(nn.Module):
    """TD3: observation (B, O), normal noise (B, A) -> the action with exploration noise, within bounds (B, A)."""

    def __init__(self, script: ModuleType, obs_shape: tuple[int, ...], action_dim: int):
        super().__init__()
        self.action_dim, self.std = action_dim, script.Args().exploration_noise
        self.actor = script.Actor(*obs_shape, gym.spaces.Box(-1, 1, (action_dim,)))

    def draw_noise(self, rows: int) -> Tensor:
        return torch.randn(rows, self.action_dim)

    def forward(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        actor = self.actor
        action = actor(obs) + actor.scale * (self.std * noise)
        return (torch.clamp(action, actor.center - actor.scale, actor.center + actor.scale),)

    def in_numpy(self):
        net, center, scale = numpy_mlp(self.actor.net), self.actor.center.numpy(), self.actor.scale.numpy()

        def act(obs: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, ...]:
            action = center + scale * (np.tanh(net(obs)) + np.float32(self.std) * noise)
            return (np.clip(action, center - scale, center + scale),)

        return act


class RLlibCNN(Categorical):
    """RLlib's default network for 84x84 images, with the outputs of PPO for discrete actions.

    By its documentation: filters 16 of 8x8 by 4, 32 of 4x4 by 2, both padded to keep ceil(size / stride), and 256 of
    11x11 over all that is left; ReLU; linear policy and value on the 256. Observation (B, 4, 84, 84), floats.
    """

    def __init__(self, _script: None, obs_shape: tuple[int, ...], num_actions: int):
        nn.Module.__init__(self)
        self.num_actions, self.is_image = num_actions, True
        self.body = nn.Sequential(
            nn.ZeroPad2d((2, 2, 2, 2)), nn.Conv2d(obs_shape[0], 16, 8, stride=4), nn.ReLU(),
            nn.ZeroPad2d((1, 2, 1, 2)), nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(),
            nn.Conv2d(32, 256, 11), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        self.policy, self.value = nn.Linear(256, num_actions), nn.Linear(256, 1)

    def agent(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, A) and value (B,)."""
        features = self.body(obs)
        return self.policy(features).log_softmax(1), self.value(features).squeeze(1)


KINDS = {
    x.__name__: x for x in (Categorical, PooledCategorical, Gaussian, EpsilonGreedy, SquashedGaussian, Deterministic)
}
# For each pair: its act function, and the observation shape and number of actions of its default environment
NETWORKS = {name: (KINDS[pair.acts], pair.obs_shape, pair.num_actions) for name, pair in TABLE.items() if pair.acts}
NETWORKS["rllib_cnn"] = (RLlibCNN, (4, 84, 84), 4)


def make_act(name: str, obs_shape: tuple[int, ...] = (), num_actions: int = 0) -> nn.Module:
    """A script's act function on the CPU, always with the same weights, for its default environment or other sizes."""
    kind, shape, number = NETWORKS[name]
    script = None if kind is RLlibCNN else load_script(SCRIPTS / f"{name}.py")
    torch.manual_seed(1)
    return kind(script, obs_shape or shape, num_actions or number)


def draw_inputs(name: str, act: nn.Module, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random observations (rows, ...), normal or bytes, and the noise for as many actions."""
    kind, shape, _ = NETWORKS[name]
    if kind is not RLlibCNN and len(shape) > 1:
        return torch.randint(256, (rows, *shape), dtype=torch.uint8, device=device), act.draw_noise(rows).to(device)
    return torch.randn(rows, *shape, device=device), act.draw_noise(rows).to(device)
