"""Models of optimisation, one per file; only backend.py knows the peculiarities of the solvers."""
