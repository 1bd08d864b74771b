"""Images: what they are built from, how they are built, looked at and run. Needs Python's own library alone."""
