"""Files, values in documents, CSV lines, executors: what touches the machine."""
