"""``pipeline new``: create a project from a template. See ``docs/reference.md``."""
