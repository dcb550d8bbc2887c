"""``pipeline submit``: run an experiment on a Ray cluster as a job, or write a script for Slurm."""
