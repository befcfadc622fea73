"""Programs that turn the scripts into numbers. None is needed to use a script; each has a command in run.sh.

A package for each question, with a module named after each command:

- `throughput`: how fast do the scripts train, beside other libraries, and where does the time go?
- `acting`: how fast does each network act, alone and in a loop with environments?
- `pools`: what do pools of slow environments gain by not waiting?
- `learning`: what do the scripts learn, over many seeds?
- `tools`: a first run, inspecting a run or a pair, and the tables of RESULTS.md.
- `gpu.py`: whatever of this needs a GPU, in three stages of nine minutes.
- `common`: what these packages share.

`results/` holds our measurements, `reference/` published scores of others, `NOTES.md` what was tried on the way.
"""

import os
import sys

# For environments of the user, `module:Env-v0`. Last, as a `copy.py` there must not hide Python's own
sys.path += [os.getcwd()] * (os.getcwd() not in sys.path)
