"""The doctor on nodes that differ."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nodes import Nodes

from pipeline.commands.doctor import Examination

pytestmark = pytest.mark.timeout(600)


def test_another_torch_on_a_node_is_named(tmp_path: Path) -> None:
    other = tmp_path / "other" / "torch"
    other.mkdir(parents=True)
    real = Path(torch.__file__).parent
    (other / "version.py").write_text(real.joinpath("version.py").read_text().replace(torch.__version__, "2.12.1+cpu"))
    # Everything but its version is the real one's.
    (other / "__init__.py").write_text(
        f"__path__.append({str(real)!r})\n__file__ = {str(real / '__init__.py')!r}\nexec(open(__file__).read())\n"
    )
    with Nodes(2, started=False) as nodes:
        nodes.start(0)
        nodes.start(1, env={"PYTHONPATH": str(other.parent)})
        nodes.await_nodes(2)
        command = nodes.inside(0, [sys.executable, "-m", "pipeline", "doctor", "--address", nodes.address, "--json"])
        ended = subprocess.run(
            command, env=nodes.environment, cwd=tmp_path, capture_output=True, text=True, timeout=200
        )

    assert ended.returncode == 3, ended.stdout + ended.stderr
    examination = Examination.model_validate_json(ended.stdout)
    assert [node.node for node in examination.nodes] == ["node0", "node1"]
    (problem,) = examination.problems
    own = torch.__version__.partition("+")[0]
    assert problem.what == f"node1 ({nodes.host(1)}) has torch 2.12.1, and this machine has {own}"
