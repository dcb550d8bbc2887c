"""Python's collector of cyclic garbage, which large imports are quicker without.

Modules stay, and so does nearly all that they make; looking through it again and again took a quarter of the time of
importing torch and `torch._dynamo`.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """No collection inside."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
