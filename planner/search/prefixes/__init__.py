"""Which prefixes of prompts each worker keeps: placed, pinned, kept alive, and how they drift."""
