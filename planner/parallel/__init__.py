"""One function over many items: here, in processes or on a cluster."""
