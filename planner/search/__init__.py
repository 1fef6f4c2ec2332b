"""From a question to a certified plan."""
