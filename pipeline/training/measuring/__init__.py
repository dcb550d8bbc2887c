"""Measurements after a training: the parts of a step, the speedup, operations and costs."""
