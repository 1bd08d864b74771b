"""Stories played for real."""
