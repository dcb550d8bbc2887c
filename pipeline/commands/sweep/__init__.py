"""``pipeline sweep``: start reading at `pipeline.commands.sweep.run_sweep`.

Ray Tune decides which trial begins when and which is stopped early; each trial is an ordinary run in a process of its
own. docs/decisions/0012-sweeps.md says why.
"""
