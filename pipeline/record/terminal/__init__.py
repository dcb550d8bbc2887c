"""Output of commands: tables, and the progress of a run in a terminal, a notebook or a log file."""
