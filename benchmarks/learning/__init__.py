"""What the scripts learn, over many seeds.

- `sweep`: the command: trains scripts x variants x environments x seeds, and can be resumed after any interruption;
  `cluster_runs` are its runs on a Ray cluster.
- `tune`: the command: searches settings, or trains a population that changes them, with Ray Tune. `tune_space` defines
  the search spaces, `tune_trial` a trial, `tune_engine` drives Ray Tune, `tune_history` and `tune_progress` track the
  trials, `tune_report` reports at the end.
- `time_to_score`: the command: wall time until a policy is good enough, beside other libraries.
- `speedrun`: the command: the same for the fastest settings that we know, and the board of records.
- `report`: the command: table, learning curves and verdicts from run folders.
  `settings` tells which settings of runs differ, and names rows after them.
"""
