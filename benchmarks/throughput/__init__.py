"""How fast the scripts train, beside other libraries, and where the time goes.

- `throughput`: the command: steady steps/s of each variant and peer, in interleaved rounds of fresh processes.
- `peers`, `peer_envpool`: Stable-Baselines3 and SBX, to train as a script does.
- `ceilings`: the environment alone, and where the time of the loop goes, by looking at it.
- `device_use`: what a script makes a GPU do.
- `gpu_speed`: the speed of a pair's variants within a minute or two, frozen and awake in turns.
- `ladder`, `rungs`: the command: what each trick gives, from the loop that everybody writes to the compiled script.
- `leanrl`: a script of LeanRL, so that it can be measured beside ours.
- `parity`: whether the variants of a pair compute the same.
"""
