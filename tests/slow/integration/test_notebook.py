"""The commands from Python, in scripts and notebooks, as `docs/reference.md` has them."""

# promise: Python and notebooks
# promise: Python and notebooks with workers, interrupted

import re
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook
from recordings import copied
from waiting import eventually

from pipeline.record import journal

ROOT = Path(__file__).parents[3]


def executed(notebook: NotebookNode, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[NotebookNode]:
    """The outputs of a notebook's cells of code, run from top to bottom in a folder."""
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    client = NotebookClient(notebook, timeout=200, allow_errors=True, resources={"metadata": {"path": str(folder)}})
    return [cell.outputs for cell in client.execute().cells if cell.cell_type == "code"]


def reply(kernel: BlockingKernelClient) -> dict[str, Any]:
    """How the next cell ended; a kernel that was waited for may still say that it is ready."""
    while (message := kernel.get_shell_msg(timeout=60))["msg_type"] != "execute_reply":
        """Of something else."""
    return message["content"]


def of_kind(kind: str, outputs: list[NotebookNode]) -> str:
    return "\n".join(output.get("data", {}).get(kind, "") for output in outputs)


@pytest.mark.filterwarnings("ignore:Proactor event loop")
def test_the_notebook_of_the_docs_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(ROOT / "docs" / "notebooks" / "first.ipynb", as_version=4)

    shown, alone, two, difference, table, history = executed(notebook, tmp_path, monkeypatch)

    assert of_kind("text/plain", shown) == "Experiment(first-notebook: 1 worker, inprocess)"
    assert float(of_kind("text/plain", alone[-1:])) > 0.8
    page = of_kind("text/html", two[-1:])
    assert "2 workers (ddp)" in page
    assert "<svg" in page
    assert float(of_kind("text/plain", difference)) < 1e-4
    assert "samples_per_second" in of_kind("text/html", table)
    assert "train/loss" in of_kind("text/html", history)
    while_it_ran = of_kind("text/html", two[:-1])
    assert "ddp, 2 workers: done, 46 steps" in while_it_ran
    assert "<progress" not in while_it_ran  # bars go when their trial has ended
    second = max((tmp_path / "runs").iterdir())
    assert "ddp, 2 workers: step 46/46" in (second / "log.txt").read_text()


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


CELLS = """
from pipeline import Experiment, run
experiment = Experiment.load("lab.yaml", "parallel={strategy: ddp, launcher: ray, workers: 2, cpus_per_worker: 1}")
%%
run(experiment, "model.fault=raises", "model.rank=1", baseline=False, quiet=True)
%%
import torch
result = run(experiment, baseline=False)
print(result.metrics["validation/loss"], torch.distributed.is_initialized())
"""


@pytest.mark.filterwarnings("ignore:Proactor event loop")
def test_workers_under_ray_from_a_notebook(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(project, tmp_path / "project", ignore=shutil.ignore_patterns("runs")))
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in CELLS.split("%%\n")])

    nothing, failed, done = executed(notebook, folder, monkeypatch)

    assert nothing == []
    assert "ZeroDivisionError: the model's own mistake" in failed[-1].traceback
    assert "rank 1" in failed[-1].traceback[-1]
    assert "ddp, 2 workers: done" in of_kind("text/html", done)
    printed = "".join(output.get("text", "") for output in done)
    assert re.fullmatch(r"\d\.\d+ False\n", printed)


@pytest.mark.parametrize("launcher", ["torchrun", "ray"])
def test_an_interrupted_kernel_ends_the_run_and_goes_on(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    folder = Path(shutil.copytree(project, tmp_path / "project", ignore=shutil.ignore_patterns("runs")))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    parallel = f"parallel={{strategy: ddp, launcher: {launcher}, workers: 2, cpus_per_worker: 1}}"
    slow = "model={_target_: lab.Sluggish, ms: 50}"
    training = f"pipeline.run('lab.yaml', {parallel!r}, {slow!r}, 'train.epochs=9999', baseline=False)"
    manager, kernel = start_new_kernel(cwd=str(folder))
    try:
        kernel.execute(f"import psutil, pipeline; {training}")
        log = eventually(lambda: next(folder.glob("runs/*/log.txt"), None))
        eventually(lambda: "ddp, 2 workers: step" in log.read_text())
        manager.interrupt_kernel()
        assert reply(kernel)["ename"] == "KeyboardInterrupt"
        kernel.execute(
            "left = psutil.Process().children(recursive=True); assert not left, [p.cmdline()[:6] for p in left]"
        )
        told = reply(kernel)
        assert told["status"] == "ok", told["evalue"]
    finally:
        kernel.stop_channels()
        manager.shutdown_kernel()
    ended = journal.ending(log.parent / journal.FILE_NAME)
    assert ended is not None
    assert ended.status == "KILLED"
