"""The room ops."""
