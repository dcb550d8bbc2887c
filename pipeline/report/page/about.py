"""Facts about a run that its page shows beside the figures; `pipeline.commands.old_page` reads them from its folder."""

from datetime import datetime

from pipeline.experiment.values import Frozen


class About(Frozen):
    """Facts about a run; what is unknown is empty."""

    run: str = ""
    """Id of the run, the name of its folder."""
    began: datetime | None = None
    command: str = ""
    """Shell command that started the run."""
    link: str = ""
    """Address of the run in MLflow's UI."""
    needs_ui: bool = False
    """True if ``pipeline ui`` has to serve that address first."""
    store: str = ""
    """Tracking store and experiment, without credentials."""
    versions: tuple[str, ...] = ()
    """Versions of the code, Python and the main packages, e.g. "torch 2.13.0"."""
    experiment: str = ""
    """Experiment in YAML, with all defaults."""
