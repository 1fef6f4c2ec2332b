"""Published forms of an engine's step time, and our own, all with one contract.

Every family is a scikit-learn estimator over X (n, 5): N, A_p, D, K, P of a step, as `planner.models.latency`
defines them, and y (n,): its seconds. `step_family.StepFamily` is their common base;
`planner.models.family_choice` picks one by cross-validation.
"""
