"""Choice of the interface to Ray: private parts of tested releases, which start workers sooner, or the public one.

The private parts are in `pipeline.launch._ray.fast`; results are the same both ways.
"""

import os
from functools import cache

import ray

VARIABLE = "PIPELINE_PLAIN_RAY"
"""Environment variable that chooses the public interface with any value but 0."""
_TESTED = ("2.60",)  # releases; tests/contract/test_launchers.py runs both ways


def public_because() -> str:
    """Return why only Ray's public interface is used; empty if private parts start workers sooner."""
    if os.environ.get(VARIABLE, "0") not in ("", "0"):
        return f"{VARIABLE} is set"
    return _unknown()


@cache
def _unknown() -> str:
    """Return what about the installed release isn't as in the tested ones; empty if nothing."""
    if ray.__version__.rpartition(".")[0] not in _TESTED:
        return f"Ray {ray.__version__} is not tested with the faster start (tested: {', '.join(_TESTED)})"
    try:
        from pipeline.launch._ray.fast import driver_controller, lean_node, patching

        wrong = patching.mismatches({**driver_controller.OVERRIDES, **lean_node.OVERRIDES})
    except (ImportError, AttributeError) as error:
        wrong = [str(error)]
    return f"Ray {ray.__version__} differs from the tested releases ({'; '.join(wrong)})" if wrong else ""
