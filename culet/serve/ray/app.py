"""Build the application of Ray Serve from its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from culet.config import Config, ServeConfig, build_config, build_serve_config
from culet.errors import ConfigError
from culet.limits import read_limits
from culet.log import setup_logging
from culet.serve.app import create_app
from culet.serve.process.kv_events import check_kv_events, is_bound
from culet.serve.ray.engines import RayEngines
from culet.serve.ray.replica import EngineReplica
from culet.serve.service import Service

_ARGUMENTS = ("engine", "serve", "num_replicas", "autoscaling", "num_gpus", "num_cpus", "num_ingresses")
_ROUTER: Any = "culet.serve.ray.router.PrefixRouter"  # Ray imports it where it is needed


class Ingress:
    """A web front end: HTTP, chat templates and tokens. It needs no GPU and no torch."""

    async def __init__(  # type: ignore[misc] # Ray awaits it
        self, config: Config, settings: ServeConfig, engines: Any, max_replicas: int
    ) -> None:
        setup_logging(form=settings.log_format)
        self._service = Service(config, settings, engines=RayEngines(engines, max_replicas))
        await self._service.start()

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self._service)

    def check_health(self) -> None:
        """Raise if Ray should replace this replica."""
        if self._service.health != "ok":
            raise RuntimeError(self._service.health)

    async def __del__(self) -> None:
        await self._service.stop()


def build(args: Mapping[str, Any]) -> Any:
    """Return the application. Errors name the bad argument, before anything is started."""
    for name in args:
        if name not in _ARGUMENTS:
            raise ConfigError(f"unknown argument: {name!r}", hint=f"known arguments: {', '.join(_ARGUMENTS)}")
    config = build_config(args.get("engine", {}))
    settings = build_serve_config(args.get("serve", {}))
    if settings.data_parallel_size != 1:
        raise ConfigError("data-parallel-size: Ray starts the replicas", hint="use num_replicas or autoscaling instead")
    limits = read_limits(settings.limits)
    scaling = args.get("autoscaling")
    if scaling is not None and "num_replicas" in args:
        raise ConfigError("num_replicas: autoscaling decides how many there are", hint="pass only one of them")
    num_replicas = args.get("num_replicas", 1)
    max_replicas = scaling.get("max_replicas", 1) if scaling is not None else num_replicas
    engines = _engine_deployment(args, config, settings).options(
        **({"num_replicas": num_replicas} if scaling is None else {"autoscaling_config": dict(scaling)})
    )
    ingress: Any = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=args.get("num_ingresses", 1),
        max_ongoing_requests=limits.connections,
        logging_config={"enable_access_log": False},
        ray_actor_options={"num_cpus": 0.1},
    )
    settings = replace(settings, host="0.0.0.0", uds=None)  # Ray listens, and clients may use any name of its machines
    return ingress.bind(config, settings, engines.bind(config, settings, limits), max_replicas)


def _engine_deployment(args: Mapping[str, Any], config: Config, settings: ServeConfig) -> Any:
    """Return the deployment of engines. A replica with several ranks gets all of its GPUs at once, on one machine."""
    has_caching = config.cache.enable_prefix_caching
    events = check_kv_events(settings.kv_events_config, num_engines=1, has_prefix_caching=has_caching)
    listens = events is not None and (is_bound(events.endpoint) or events.replay_endpoint is not None)
    num_ranks = config.parallel.tensor_parallel_size
    num_gpus = args.get("num_gpus", 0 if config.model.device == "cpu" else num_ranks)
    placement: dict[str, Any] = {"max_replicas_per_node": 1} if listens else {}  # all replicas have the same endpoints
    return serve.deployment(
        EngineReplica,
        name="Engine",
        # More wait in the ingress, from where a new replica can take them.
        max_ongoing_requests=config.schedule.max_num_seqs,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
        graceful_shutdown_timeout_s=settings.request_timeout,  # until then, every request has ended
        health_check_period_s=5,
        logging_config={"enable_access_log": False},  # the ingress logs each request
        ray_actor_options={"num_cpus": args.get("num_cpus", num_ranks), "num_gpus": num_gpus},
        **placement,
    )
