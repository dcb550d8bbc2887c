"""The driver's part of every command that trains: checks, execution, recovery, elastic sizes."""
