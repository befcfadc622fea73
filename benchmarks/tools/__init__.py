"""A first run, a look at a run, at a pair, and the tables of the README.

- `demo`: the command: two minutes of training, with a learning curve at the end.
- `evaluate`: the command: plays the deterministic policy of a run; `follow`, while it trains; `play` is how.
- `diff`: the command: what a pair differs in, hunk by hunk, each with its reason.
- `readme`: the command: makes all tables and figures again from the committed results.
- `stale`: the command: which of these results today's code might not give again, and why.
"""
