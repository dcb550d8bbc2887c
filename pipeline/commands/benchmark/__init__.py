"""``pipeline benchmark``: measure the configurations of an experiment, or a completed run again."""
