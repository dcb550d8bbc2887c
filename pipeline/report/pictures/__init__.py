"""Pictures of a report, drawn with matplotlib."""
