"""``pipeline benchmark``: measure the configurations of an experiment."""
