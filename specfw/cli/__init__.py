"""The command line; `specfw.cli.main` is its entry."""
