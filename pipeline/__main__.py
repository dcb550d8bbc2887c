"""``python -m pipeline`` is the command ``pipeline``."""

from pipeline.cli import main

main()
