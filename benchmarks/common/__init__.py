"""What the other packages share.

- `programs`: the scripts as programs: which pairs and variants there are, how to run or load one.
- `pairs`: the table of pairs: what tests and benchmarks must know about each.
- `processes`: child processes that can't outlive their parent and can be frozen and woken.
- `turns`: measures one at a time what was prepared in parallel.
- `runs`: reads the run folders that the scripts leave.
- `steady`: steady speed from the lines of a log.
- `stats`: interquartile means, bootstrap and Student's intervals.
- `results`: where a result comes from, and tables.
- `plots`: one look for all figures.
"""
