"""``pipeline schema``: the JSON Schema of experiment files."""

import json

from pipeline.commands.options import print_json
from pipeline.experiment.problems import experiment_json_schema


def schema() -> None:
    """Print the JSON Schema of experiment files, for editors."""
    print_json(json.dumps(experiment_json_schema(), indent=2))
