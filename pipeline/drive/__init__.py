"""The driver's part of every command that trains: preflight checks, execution, resuming, elastic sizes."""
