"""Published forms of an engine's step time, and ours, one per file, all with one contract.

Every family is a scikit-learn estimator over X (n, 5): N, A_p, D, K, P of a step, as `planner.models.latency`
defines them, and y (n,): its seconds. `common.StepFamily` says what they share; `planner.models.choice` picks
one by cross-validation.
"""
