"""Text of a report: the names of its rows, its tables and sentences, the same wherever it is shown."""
