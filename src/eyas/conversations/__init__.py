"""The room conversations."""
