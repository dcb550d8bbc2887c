"""Evaluation that counts each held-out sample once. Start at `held_out`."""
