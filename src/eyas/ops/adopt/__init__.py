"""Folders of other programs under DVC."""
