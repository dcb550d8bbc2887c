"""Records of a run: the journal first; the terminal, MLflow and trackers are copies of it."""
