"""Who starts the workers: one file each, the file name is the name in the YAML.

A launcher module exports ``Launcher``, which fulfils `pipeline.launchers.base.Launcher`.
"""
