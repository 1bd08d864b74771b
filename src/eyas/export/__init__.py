"""The room export."""
