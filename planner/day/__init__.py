"""A day on pools that change: who decides, the optimum, the study of all, its pages and manifests.

A wing: the spine knows nothing of it."""
