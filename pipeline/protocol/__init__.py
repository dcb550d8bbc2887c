"""Data and messages between driver and workers: trials, outcomes, events, progress, and the channel for them."""
