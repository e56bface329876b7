"""SGLang servers and their clients. Nothing is imported here: SGLang loads ``cpu_platform`` through this package."""
