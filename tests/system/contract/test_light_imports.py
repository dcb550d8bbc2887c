"""What is asked before anything starts loads no heavy library: a plan and --help answer at once."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "ray", "mlflow", "torchmetrics")
ASKED = {
    "an experiment file": "from pipeline.experiment import load, components; load.load('experiments/mlp.yaml')",
    "strategies and launchers": "from pipeline import registry as r; r.names('strategies'); r.names('launchers')",
    "the machine": "from pipeline.plan.resources import detect; detect()",
    "new projects": "from pipeline.commands.new import create",
}


def test_nothing_heavy_is_imported() -> None:
    found = f"[name for name in {HEAVY} if name in sys.modules]"
    code = "import sys\n" + "\n".join(f"{asked}\nprint({what!r}, {found})" for what, asked in ASKED.items())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.stdout, done.stderr) == ("".join(f"{what} []\n" for what in ASKED), "")
