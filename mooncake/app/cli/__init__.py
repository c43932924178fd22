"""The command line: names, flags and exit codes."""
