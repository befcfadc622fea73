"""What the scripts learn, over many seeds.

- `sweep`: the command: trains scripts x variants x environments x seeds, and survives whatever ends it.
- `time_to_score`: the command: wall time until a policy is good enough, beside other libraries.
- `speedrun`: the command: the same of the fastest settings that we know, and the board of records.
- `report`: the command: table, learning curves and verdicts from run folders.
"""
