"""The command `eyas`: everything that is not a stage."""
