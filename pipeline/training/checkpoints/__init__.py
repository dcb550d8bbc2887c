"""Checkpoints: the state that a rank needs to continue exactly. Start at `pipeline.training.checkpoints.manager`.

`manifest` and `storage` import no torch: the driver lists and verifies checkpoints with them.
"""
