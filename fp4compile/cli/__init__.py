"""The command line: `main.py` has the parser, and every other file one subcommand."""
