"""The notebook of the docs, up to where it starts workers; then what a user may well try next."""

# promise: Python and notebooks

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell
from recordings import copied

ROOT = Path(__file__).parents[3]


def executed(notebook: NotebookNode, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[NotebookNode]:
    """The outputs of a notebook's cells of code, run from top to bottom in a folder."""
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    client = NotebookClient(notebook, timeout=200, allow_errors=True, resources={"metadata": {"path": str(folder)}})
    return [cell.outputs for cell in client.execute().cells if cell.cell_type == "code"]


def of_kind(kind: str, outputs: list[NotebookNode]) -> str:
    return "\n".join(output.get("data", {}).get(kind, "") for output in outputs)


REFUSED = """
class Net(torch.nn.Linear): pass
run(experiment, "model={_target_: __main__.Net, in_features: 64, out_features: 10}")
"""


@pytest.mark.filterwarnings("ignore:Proactor event loop")
def test_the_beginning_of_the_notebook_of_the_docs(
    tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to where it starts workers; then what a user may well try next."""
    copied(empty_store, tmp_path)
    notebook = nbformat.read(ROOT / "docs" / "notebooks" / "first.ipynb", as_version=4)
    end = next(n for n, cell in enumerate(notebook.cells) if cell.source.startswith("## Two workers"))
    more = ["alone", "import torch\nprint(torch.is_grad_enabled(), len(alone.losses))", REFUSED]
    notebook.cells = [*notebook.cells[:end], *map(new_code_cell, more)]

    shown, trained, result, kernel, refused = executed(notebook, tmp_path, monkeypatch)

    assert of_kind("text/plain", shown) == "Experiment(first-notebook: 1 worker, inprocess)"
    assert float(of_kind("text/plain", trained[-1:])) > 0.8
    told = of_kind("text/html", trained)
    assert "1 worker: done, 46 steps" in told
    assert "Notes" not in told  # it is shown where it is asked for
    assert "TqdmWarning" not in "".join(output.get("text", "") for output in trained)
    assert "<svg" in of_kind("text/html", result)
    assert "".join(output.text for output in kernel) == "True 46\n"  # which arrives in one piece or several
    (folder,) = (tmp_path / "runs").iterdir()
    assert "1 worker: step 46/46" in (folder / "log.txt").read_text()
    assert refused[-1].ename == "ExperimentError"
    (line,) = refused[-1].traceback
    assert "model._target_: __main__.Net is defined in a notebook or a script" in line
