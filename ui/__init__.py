"""The planner in a browser: `plan ui`. Here is only drawn and kept; whatever is computed is in planner/."""
