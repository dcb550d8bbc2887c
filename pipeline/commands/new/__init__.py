"""``pipeline new``: projects from the templates, and updates of them. See ``docs/templates.md``."""
