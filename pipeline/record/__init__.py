"""Folder of a run with its journal: written, found, read and summarized; and the terminal, which shows its events."""
