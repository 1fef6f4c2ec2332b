"""JSON Schemas of slo.yaml, fleet.yaml, plan.yaml and answers, made from the tables of their readers."""
