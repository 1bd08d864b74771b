"""States to and from other projects."""
