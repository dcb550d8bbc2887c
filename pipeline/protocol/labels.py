"""Labels of trials: their role, the held-out set that they evaluate, and how they ended."""

from typing import Literal

Role = Literal["main", "baseline", "reference", "cell", "evaluation", "check"]  # Role of a trial
PARENTS = ("sweep",)  # Roles of runs whose trainings are runs themselves, each in a folder inside theirs
Split = Literal["validation", "test"]  # Held-out set that can be evaluated
Status = Literal["FINISHED", "FAILED", "KILLED"]
