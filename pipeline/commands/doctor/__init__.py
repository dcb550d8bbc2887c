"""What a machine or a cluster has and lacks: ``pipeline doctor``. Start reading at `examination.examine`."""
