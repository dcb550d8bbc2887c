"""Trackers other than MLflow: those of other packages, and those of ours, a module each."""
