"""SGLang as an engine: a real server beside us, a plugin inside it, shared memory between."""
