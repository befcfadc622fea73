"""Programs that turn the scripts into numbers. None is needed to use a script; each has a command in run.sh.

A room for each question, and in it a module of the command's name:

- `throughput`: how fast do the scripts train, beside other libraries, and where does the time go?
- `acting`: how fast does each network act, alone and in a loop with environments?
- `pools`: what do pools of slow environments gain by not waiting?
- `learning`: what do the scripts learn, over many seeds?
- `tools`: a first run, a look at a run, at a pair, and the tables of the README.
- `gpu.py`: what of all this needs a GPU, in nine minutes.
- `common`: what the rooms share.

`results/` holds what was measured, `reference/` what others have published, `NOTES.md` what was tried on the way.
"""
