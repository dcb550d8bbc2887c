"""Training on one rank: the visible loop and what it stands on. Start at `pipeline.training.loop`."""
