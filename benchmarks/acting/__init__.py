"""How fast each network acts: alone, and in a loop with environments.

- `inference`: the command: each network with each way to run it; `inference_worker` measures one combination.
- `rollout`: the command: environments sampled by a policy; `rollout_worker` measures one policy.
- `networks`: what each algorithm computes to act, as one function.
- `paths`: the ways to run such a function: eager, compiled, exported, as a CUDA graph, in NumPy.
"""
