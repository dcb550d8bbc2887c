"""Batches of a rank: the order of samples, readers and loaders. Start at `rank_batches`."""
