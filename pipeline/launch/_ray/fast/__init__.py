"""A faster start of Ray by private parts of releases that were tested with them; each has a public counterpart.

All that reaches into Ray for speed is in this folder. `pipeline.launch._ray.interface` decides whether it is used.
"""
