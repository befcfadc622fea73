"""What the scripts learn, over many seeds.

- `sweep`: the command: trains scripts x variants x environments x seeds, and survives whatever ends it.
- `report`: the command: table, learning curves and verdicts from run folders.
"""
