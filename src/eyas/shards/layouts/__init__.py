"""Hidden states in other projects' file layouts, both ways (docs/formats/layouts.md)."""
