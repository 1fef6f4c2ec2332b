"""Several LLMs on one stock: the question, the search, what limits cost, the answer on disk."""
