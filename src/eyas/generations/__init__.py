"""The room generations."""
