"""The contract of launchers, for each that is registered; Ray's is in tests/slow/integration/test_ray_launcher.py."""

# promise: the traceback of the first failing rank; a killed worker is reported; no process remains

import pytest
from launcher_contract import LauncherContract

from pipeline import registry


@pytest.mark.parametrize("launcher", [name for name in registry.names("launchers") if name != "ray"])
class TestLaunchers(LauncherContract):
    pass
