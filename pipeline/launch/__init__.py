"""Launchers, which start a trial's workers: one file each, whose name is the name in the YAML.

A launcher module exports ``Launcher``, a subclass of `pipeline.launch.base.Launcher`.
"""
