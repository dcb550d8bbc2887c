"""An experiment sent elsewhere: to a Ray cluster as a job, or as a manifest for Kubernetes or Slurm."""
