"""One rank of one trial in one process; `pipeline.worker.main` is what every launcher runs."""
