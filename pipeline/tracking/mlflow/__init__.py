"""MLflow: its store, and the process that sends it a run's journal, live or afterwards."""
