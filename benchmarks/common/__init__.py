"""What the rooms share.

- `programs`: the scripts as programs: which pairs and variants there are, how to call or to load one.
- `pairs`: the table of pairs: what tests and benchmarks must know of each.
- `processes`: child processes that can't outlive their parent, to freeze and to wake.
- `turns`: measuring one at a time what has prepared side by side.
- `runs`: reads the run folders that the scripts leave.
- `steady`: steady speed from the lines of a log.
- `stats`: interquartile means and bootstrap intervals.
- `results`: where a result comes from, and tables.
- `plots`: one look for all figures.
"""
