"""Reports of runs, benchmarks, sweeps and evaluations: their numbers, and every form in which they are shown."""
