"""What pools of slow environments gain by not waiting for the slowest.

- `env_pools`: the command: our pool and those of other libraries, compared with the formulas.
- `scaling`: the command for one node and many: lock-step, batched and first-ready, over Ray.
- `models`: the formulas.
- `peers`: the pools, each as an object with the same three methods.
- `sleeping`: environments whose steps take a known time.
"""
