"""From an experiment and resources to a plan: trials with workers, devices and threads. Pure; starts nothing."""
