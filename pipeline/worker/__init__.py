"""One process, one rank, one trial. `pipeline.worker.main` is where every launcher ends."""
