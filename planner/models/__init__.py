"""What an engine does, fitted or derived: the time of a step, the memory, and more; a file for each."""
