"""Settings shared by all tests."""

from hypothesis import HealthCheck, settings

# a busy machine is slow, not wrong
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
