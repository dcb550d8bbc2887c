"""Checks of an experiment by what it computes: the loss is a mean, values are finite, what couples the ranks."""
