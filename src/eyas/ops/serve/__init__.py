"""The server benchmark: what a real server makes of the exported drafter."""
