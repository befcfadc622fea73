"""What `./run.sh copy --small` puts in the place of a script's own classes `Envs` and `Run`.

All other names, and the methods of `KEPT` in copy.py, are those of the script: this module is text, and can't be
imported.
"""
# ruff: noqa: F821


class Envs:
    """N environments of Gymnasium, stepped in turn in this process: flat observations (N, O), actions (N, A) or (N,).

    Autoreset happens one step late: the observation at an episode's end is its true last one; the next step ignores its
    action, resets that environment and returns reward 0. This row does not count as a step.
    """

    def __init__(self, args: Args, seeds: list[int]):
        sys.path.append(os.getcwd())  # for `module:Env-v0`
        spec, settings = gym.registry.get(args.env_id, args.env_id), json.loads(args.env_kwargs)
        self.num_envs, self.seeds = len(seeds), seeds
        self.vector = SyncEnvs([partial(make_env, spec, settings)] * len(seeds))
        self.observation_space = self.vector.single_observation_space
        self.action_space = self.vector.single_action_space
        self.obs_dim = gym.spaces.flatdim(self.observation_space)

    def reset(self) -> np.ndarray:
        """Start an episode in each environment -> observation (N, O)."""
        obs, _ = self.vector.reset(seed=self.seeds)
        self.seeds = [None] * self.num_envs  # a second reset begins other episodes
        self.last_obs = obs.reshape(self.num_envs, self.obs_dim)
        check_finite(self.last_obs, np.zeros(1), np.zeros(self.num_envs, dtype=bool))
        return self.last_obs

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step each environment: action -> observation (N, O), reward (N,), terminated (N,), truncated (N,)."""
        action = action.reshape(self.num_envs, *self.action_space.shape)
        obs, reward, terminated, truncated, _ = self.vector.step(action)
        obs = obs.reshape(self.num_envs, self.obs_dim)
        check_finite(obs, reward, terminated, self.last_obs)  # not 0: a normalization may count it
        self.last_obs = obs
        return obs, reward, terminated, truncated

    def close(self) -> None:
        self.vector.close()


class Run:
    """A run's settings, counters and random numbers, its folder with log and checkpoint, its progress bar."""

    def __init__(self, args: Args):
        """Choose the device, and seed all random numbers."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.args, self.device = args, torch.device(device if args.device == "auto" else args.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device.index or 0)  # CUDA graphs are recorded on the current device
        self.step = self.num_updates = self.logged_step = self.saved_step = 0
        self.seconds, self.episodes, self.returns = 0.0, [], deque(maxlen=100)
        self.checkpoint_every = max(1, args.total_timesteps // 10)
        random.seed(args.seed)
        np.random.seed(args.seed % 2**32)
        torch.manual_seed(args.seed)

    def env_seeds(self, num_envs: int) -> list[int]:
        """A seed for each environment, different for each --seed."""
        return (np.random.SeedSequence([self.args.seed, 0]).generate_state(num_envs) >> 1).tolist()

    def open(self, envs: Envs, **state) -> None:
        """Open the run's folder; the parts of `state` are what a checkpoint holds."""
        self.envs, self.state = envs, state
        name = f"{self.args.env_id}__{self.args.exp_name}__{self.args.seed}"
        self.dir = Path(self.args.run_dir) if self.args.run_dir else new_folder(Path("runs"), name)
        self.dir.mkdir(parents=True, exist_ok=True)
        if any(self.dir.iterdir()):
            fail(f"the run folder {self.dir} is not empty")
        config = {"script": Path(__file__).name, "args": asdict(self.args), "env_backend": "gymnasium"}
        config["device"] = torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"
        (self.dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        self.file = (self.dir / "metrics.jsonl").open("x", buffering=1)
        hidden = False if type(sys.stderr).__module__ == "ipykernel.iostream" else None  # None: unless on a terminal
        self.bar = tqdm(total=self.args.total_timesteps, unit=" steps", unit_scale=True, disable=hidden)
        self.start_time = time.perf_counter()

    def log(self, metrics: dict[str, float]) -> None:
        """Write a line, with means over the episodes that ended since the last line, and save if that is due.

        Metrics of your own belong in the script's own call: if it asks `is_due`, one before it takes its place.
        """
        seconds = time.perf_counter() - self.start_time
        metrics = metrics | {"charts/SPS": (self.step - self.logged_step) / (seconds - self.seconds)}
        if self.episodes:
            self.returns.extend(episode_return for episode_return, _ in self.episodes)
            means = np.mean(self.episodes, axis=0).tolist()
            metrics["charts/episodic_return"], metrics["charts/episodic_length"] = means
            metrics["charts/episodes"] = len(self.episodes)
        for name, value in metrics.items():
            if not math.isfinite(value):
                sys.exit(f"error: {name} is {value} at step {self.step}")
        line = {"global_step": self.step, "seconds": round(seconds, 3), **metrics}
        self.file.write(json.dumps(line, default=float) + "\n")
        self.bar.set_postfix({"return": f"{np.mean(self.returns):.1f}"} if self.returns else {}, refresh=False)
        self.bar.update(self.step - self.logged_step)
        self.logged_step, self.seconds = self.step, seconds
        self.episodes.clear()
        if self.step // self.checkpoint_every > self.saved_step // self.checkpoint_every:
            self.save()

    def save(self) -> None:
        """Write the checkpoint beside the old one, then replace that: a complete one is on disk at all times."""
        state = {name: part.state_dict() for name, part in self.state.items()}
        state |= {"args": asdict(self.args), "global_step": self.step, "seconds": self.seconds}
        torch.save(state, self.dir / "checkpoint.tmp")
        (self.dir / "checkpoint.tmp").replace(self.dir / "checkpoint.pt")
        self.saved_step = self.step

    def goes_on(self) -> bool:
        return self.step < self.args.total_timesteps

    def close(self) -> Path:
        """Save, and say how it went; returns the run's folder."""
        if self.step > self.logged_step:
            self.log({})
        if self.step > self.saved_step:
            self.save()
        self.envs.close()
        self.bar.close()
        self.file.close()
        count = len(self.returns)
        score = f", mean return of the last {count} episodes {np.mean(self.returns):.1f}" if count else ""
        print(f"{self.step:,} steps in {self.seconds:.1f} s{score}\nlog, checkpoint, configuration: {self.dir}")
        return self.dir
