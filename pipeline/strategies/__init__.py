"""Strategies of data-parallel training, one file each; the file name is the name in the YAML.

A strategy module exports ``Strategy``, a subclass of `pipeline.strategies.base.Strategy`.
"""
