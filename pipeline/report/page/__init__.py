"""The page of a report, and the files that a run's folder gets with it."""
