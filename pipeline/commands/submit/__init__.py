"""``pipeline submit``: run an experiment on a Ray cluster as a job, or write a manifest for KubeRay or Slurm."""
