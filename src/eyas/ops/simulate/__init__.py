"""Predicting a run past this machine: ``eyas simulate`` (docs/simulate.md)."""
