"""Deleting on purpose: a plan, its confirmation, the account."""
