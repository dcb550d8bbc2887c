"""The end of a command: one `record.Result`, and the terminal, the page, MLflow and JSON as loops over it."""
