"""Planning: an experiment and resources become trials with workers, devices and threads. Pure; starts nothing."""
