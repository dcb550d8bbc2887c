"""``pipeline sweep``: start reading at `pipeline.commands.study_trials.run_sweep`.

Ray Tune decides when trials start and which are stopped early; each trial is an ordinary run in a separate process.
docs/decisions/0012-sweeps.md says why.
"""
