"""``pipeline list``, ``show`` and ``diff``: earlier runs and their results."""
