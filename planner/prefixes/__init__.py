"""What prompts share, what caches make of it, and where prefixes should live."""
