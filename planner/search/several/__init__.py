"""Several LLMs on one stock."""
