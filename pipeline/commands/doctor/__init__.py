"""``pipeline doctor``: checks of a machine or a cluster. Start reading at `examination.examine`."""
