"""The pages of the MLflow UI that show runs: its front page and an experiment's bare address show what is for GenAI."""

import json
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import NamedTuple

from pipeline.recording.mlflow_view import TAG
from pipeline.recording.store import runs_link

_MOST = 10
_TIMEOUT_S = 5.0


class Page(NamedTuple):
    """The runs of an experiment."""

    experiment: str
    """Its name."""
    link: str


def pages(address: str) -> Iterator[Page]:
    """The experiments of ours that were written to last, the latest first.

    Args:
        address: of the UI, which is a tracking server at the same time.

    Raises:
        OSError: it doesn't answer, or not to us.
    """
    query = urllib.parse.urlencode({"max_results": _MOST, "order_by": "last_update_time DESC"})
    url = f"{address}/api/2.0/mlflow/experiments/search?{query}"
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - http(s), see is_server
        found = json.load(answer).get("experiments", [])
    for experiment in found:
        if any(tag["key"] == TAG for tag in experiment.get("tags", [])):
            yield Page(experiment["name"], runs_link(address, experiment["experiment_id"]))
