"""Not SGLang: a double of its server with eyas' plugin inside, for tests without one."""
