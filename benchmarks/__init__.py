"""Programs that turn the scripts into numbers: each has a command in run.sh; none is needed to use a script."""
