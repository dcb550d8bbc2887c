"""``pipeline list`` and ``show``: earlier runs and their results."""
