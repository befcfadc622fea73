"""How fast the scripts train, beside other libraries, and where the time goes.

- `throughput`: the command: steady steps/s of each variant and peer, in interleaved rounds of fresh processes.
- `peers`, `peer_envpool`: Stable-Baselines3 and SBX, to train as a script does; `peer_rllib`: RLlib.
- `peer_cleanrl`: runs a script of CleanRL or LeanRL, unchanged, and logs its speed.
- `ceilings`: the environment alone, and where the time of the loop goes, by sampling the running loop.
- `device_use`: how busy a script keeps a GPU, and with what.
- `gpu_speed`: the speed of a pair's variants within a minute or two; they take turns, the others frozen meanwhile.
- `ladder`, `rungs`: the command: what each trick gains, from a plain loop to the compiled script.
- `backends`: the command: which way to step environments is the fastest, and whether the scripts choose it.
- `limits`: the command: how near the compiled scripts are to what the machine's parts, called alone, could do.
- `parity`: whether the variants of a pair compute the same.
"""
