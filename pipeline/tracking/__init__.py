"""The process that sends a run to MLflow and to loggers: a reader of the run's journal."""
