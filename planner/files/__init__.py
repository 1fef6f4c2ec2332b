"""Files, values in documents, CSV lines, compiled code on disk: what touches the machine."""
