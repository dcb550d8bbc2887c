"""``pipeline compare``: which of several experiments is better, over recorded runs or over trainings of a study."""
