"""A day of traffic on pools that change: controllers, what each costs and misses, and the optimum."""
