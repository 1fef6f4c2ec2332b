"""Settings for Ray Serve's own autoscaler: `autoscaling_config` of a deployment (ray/serve/config.py, Ray
2.60.0).

Ray Serve's autoscaler follows the requests in flight per replica, averaged over some seconds, and waits for a
delay before it adds or removes replicas. So settings are made only for controllers that follow concurrency.
"""

from planner.day.autoscaling.autoscaler import Autoscaler, Document, ScaledPool
from planner.day.controllers.hpa import HpaSettings
from planner.day.controllers.keda import KedaSettings
from planner.day.controllers.knative import KnativeSettings
from planner.errors import InputError
from planner.fleet import Fleet
from planner.manifests import engine_command

ScaledBy = HpaSettings | KedaSettings | KnativeSettings
LOOK_BACK_S = 30.0  # Ray Serve averages over this time by default.


def check(autoscaler: Autoscaler) -> None:
    """Raise InputError for a controller that follows anything but concurrency, or has a timetable too."""
    if autoscaler.controller == "knative":
        return
    for pool in autoscaler.pools:
        if (metric_name := autoscaler.of_role(pool.role).settings.metric) != "concurrency":
            raise InputError(
                f"{autoscaler.controller}: metric: Ray Serve follows requests in flight alone: expected "
                f"concurrency, found {metric_name!r}"
            )
        if autoscaler.controller == "keda" and pool.timetable:
            raise InputError(f"{autoscaler.controller}: cron: Ray Serve has no timetable; leave it out")


def add_autoscaling(document: Document, fleet: Fleet, autoscaler: Autoscaler) -> None:
    """Write the autoscaling settings into a serve config (manifests/ray_serve.py), in place."""
    scaled = {pool.name: pool for pool in autoscaler.pools}
    for application, (pool, prefill) in zip(
        document["applications"], engine_command.pool_services(fleet, "ray-serve").values(), strict=True
    ):
        args = application["args"]
        # The application of a pair has a config for each pool, that of a mixed pool a list with one.
        config = args["decode_config"] if prefill is not None else args["llm_configs"][0]
        _replace_count(config, autoscaler.of_role(pool.role).settings, scaled[pool.name])
        if prefill is not None:
            _replace_count(
                args["prefill_config"], autoscaler.of_role("prefill").settings, scaled[prefill.name]
            )


def _replace_count(config: Document, settings: ScaledBy, pool: ScaledPool) -> None:
    """Replace the fixed count of a pool's deployment by an autoscaler's settings."""
    deployment = config["deployment_config"]
    del deployment["num_replicas"]
    deployment["autoscaling_config"] = _autoscaling_config(settings, pool)


def _autoscaling_config(settings: ScaledBy, pool: ScaledPool) -> Document:
    """Ray Serve's settings for a pool."""
    if isinstance(settings, KnativeSettings):
        target, look_back_s = settings.target * settings.utilization_frac, settings.window_s
        # Knative's settings have a delay before workers are removed, and none before they are added.
        up_s, down_s = 0.0, settings.down_delay_s
    else:
        target, look_back_s = settings.per_worker, LOOK_BACK_S
        up_s, down_s = settings.up_window_s, settings.down_window_s
    return {
        "min_replicas": pool.least,
        "initial_replicas": pool.size,
        "max_replicas": pool.most,
        "target_ongoing_requests": target,
        "look_back_period_s": look_back_s,
        "upscale_delay_s": up_s,
        "downscale_delay_s": down_s,
    }


LIMITS = (
    "Ray Serve decides by its own rule: the mean of the requests in flight, divided by the target and "
    "rounded up, once this has been the same for the delay. That is not what was simulated.",
    "Replicas need nodes: the Ray cluster's own autoscaler, or `ray start` on more nodes.",
)
