"""A Python outside of this project, in which ``pipeline`` can't be imported."""

import re


def code(readme: str) -> list[str]:
    """The blocks of Python in the README of an exported model."""
    return re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
