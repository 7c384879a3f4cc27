"""Training runs, replays and benchmarks: the programs that put the packages together."""
