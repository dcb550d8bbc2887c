"""Looking back at runs: ``pipeline list``, ``show`` and ``diff``."""
