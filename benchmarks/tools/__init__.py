"""A first run, inspecting a run or a pair, and the tables of RESULTS.md.

- `demo`: the command: some minutes of training, with a learning curve at the end.
- `evaluate`: the command: plays a run's deterministic policy; `follow` does so while it trains; `play` implements both.
- `diff`: the command: how the two scripts of a pair differ, hunk by hunk, each with its reason.
- `copy`: the command: a pair under a name of one's own, with `small_plumbing` if it is to be short.
- `readme`: the command: remakes all tables and figures from the committed results.
- `stale`: the command: which of these results today's code might not reproduce, and why.
"""
