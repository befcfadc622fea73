"""What the scripts learn, over many seeds.

- `sweep`: the command: trains scripts x variants x environments x seeds, and survives whatever ends it.
- `tune`: the command: searches settings, or trains a population that changes them, by Ray Tune. What it searches is in
  `tune_space`, a trial in `tune_trial`, Ray Tune's part in `tune_engine`, what was seen in `tune_history` and
  `tune_progress`, the end in `tune_report`.
- `time_to_score`: the command: wall time until a policy is good enough, beside other libraries.
- `speedrun`: the command: the same of the fastest settings that we know, and the board of records.
- `report`: the command: table, learning curves and verdicts from run folders.
"""
