"""``pipeline new``: create a project from a template, or update it. See ``docs/reference.md``."""
