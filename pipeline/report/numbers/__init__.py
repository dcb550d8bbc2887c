"""Numbers of a report: what was measured, compared, predicted and recorded."""
