"""One file per page; each runs from top to bottom whenever an input changes."""
