"""One verb a file: parse argv paths, load params, call the room, write records, print a summary."""
