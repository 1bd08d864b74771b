"""The room batches."""
