"""Settings for Ray Serve's own autoscaler: `autoscaling_config` of a deployment (ray/serve/config.py, Ray
2.60.0).

Ray Serve's autoscaler follows the requests in flight per replica, averaged over some seconds, and waits for a
delay before it adds or removes replicas. So settings are made only for controllers that follow concurrency.
"""

from planner.day.autoscaling import hpa_object, knative_object, prometheus_queries
from planner.day.autoscaling.autoscaler import Autoscaler, Document, ScaledPool
from planner.errors import InputError
from planner.fleet import Fleet
from planner.manifests import engine_command

LOOK_BACK_S = 30.0  # Ray Serve averages over this time by default.


def check(autoscaler: Autoscaler) -> None:
    """Raise InputError for a controller that follows anything but concurrency, or has a timetable too."""
    if autoscaler.controller == "knative":
        return
    for pool in autoscaler.pools:
        if (metric_name := autoscaler.of_role(pool.role).read_text("metric", "queue")) != "concurrency":
            raise InputError(
                f"{autoscaler.controller}: metric: Ray Serve follows requests in flight alone: expected "
                f"concurrency, found {metric_name[:100]!r}"
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
        # The application of a prefill and a decode pool has a config for each; that of a mixed pool has a
        # list with one config.
        config = args["decode_config"] if prefill is not None else args["llm_configs"][0]
        _replace_count(config, autoscaler.of_role(pool.role), scaled[pool.name])
        if prefill is not None:
            _replace_count(args["prefill_config"], autoscaler.of_role("prefill"), scaled[prefill.name])


def _replace_count(config: Document, autoscaler: Autoscaler, pool: ScaledPool) -> None:
    """Replace the fixed count of a pool's deployment by an autoscaler's settings."""
    deployment = config["deployment_config"]
    del deployment["num_replicas"]
    deployment["autoscaling_config"] = _autoscaling_config(autoscaler, pool)


def _autoscaling_config(autoscaler: Autoscaler, pool: ScaledPool) -> Document:
    """Ray Serve's settings for a pool; a value that the controller leaves out is the controller's default."""
    if autoscaler.controller == "knative":
        requests = autoscaler.read_number("target", knative_object.DEFAULTS.target)
        target = requests * autoscaler.read_number(
            "utilization_frac", knative_object.DEFAULTS.utilization_frac
        )
        look_back_s = autoscaler.read_number("window_s", knative_object.DEFAULTS.window_s)
        # Knative's settings have a delay before workers are removed, and none before they are added.
        up_s, down_s = 0.0, autoscaler.read_number("down_delay_s", 0.0)
    else:
        name = "threshold" if autoscaler.controller == "keda" else "target"
        target = autoscaler.read_number(name, prometheus_queries.METRICS["concurrency"].usual)
        look_back_s = LOOK_BACK_S
        up_s = autoscaler.read_number("up_window_s", hpa_object.DEFAULTS.up_window_s)
        down_s = autoscaler.read_number("down_window_s", hpa_object.DEFAULTS.down_window_s)
    if target <= 0:
        raise InputError(f"{autoscaler.controller}: target: {target:g}, must be > 0")
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
