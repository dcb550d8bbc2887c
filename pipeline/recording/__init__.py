"""What happened, written down: the journal first, then the terminal and MLflow."""
