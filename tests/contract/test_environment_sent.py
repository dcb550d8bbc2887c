"""An environment that is sent to another process may hold any bytes."""

import json
import os
import subprocess
import sys

from pipeline.experiment.values import WithEnvironment

ENTERED = """
import json, os, sys
from pipeline.experiment.values import WithEnvironment
WithEnvironment.model_validate_json(sys.stdin.read()).enter()
print(json.dumps([os.environ["NAME"], "GONE" in os.environ, os.getenv("NAME") == os.fsdecode(os.environb[b"NAME"])]))
"""


def test_it_arrives_as_it_was() -> None:
    value = os.fsdecode(b"a\xffb=\n\xe4")
    sent = WithEnvironment(environment=WithEnvironment.encoded({"NAME": value, "PATH": os.environ["PATH"]}))
    done = subprocess.run(
        [sys.executable, "-c", ENTERED],
        input=sent.model_dump_json(),
        env={**os.environ, "GONE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [value, False, True]
