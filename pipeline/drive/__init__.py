"""The driver's part of every command that trains: preflight checks, execution with restarts, resuming."""
