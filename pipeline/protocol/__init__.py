"""What driver and workers say to each other: trials, events, progress, failures, and the channel that carries them."""
