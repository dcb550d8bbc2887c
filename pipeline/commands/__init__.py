"""The commands: one file or folder for each verb of the command line, without parsing and printing."""
