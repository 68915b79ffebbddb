"""The volunteer's program: command line, units of work and settings."""
