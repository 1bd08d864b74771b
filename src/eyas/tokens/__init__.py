"""The room tokens."""
