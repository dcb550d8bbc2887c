"""Checkpoints: what a rank needs to go on as if it had never stopped. Start at `pipeline.training.checkpoints.manager`.

`manifest`, `storage` and `catalog` know nothing of torch: the driver lists and verifies checkpoints with them.
"""
