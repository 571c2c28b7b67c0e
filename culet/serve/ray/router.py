"""The request router: Culet's choice of an engine (`culet.serve.engines.routing`) as a router of Ray Serve.

It runs in the process of the ingress, which has compared the prompt with what it knows of each replica's cache.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from culet.cache.mirror import Overlap
from culet.serve.engines.routing import Candidate, ranked
from culet.serve.ray.messages import Route


class PrefixRouter(RequestRouter):  # type: ignore[misc, unused-ignore]
    """Sends a request to the replica that has most of its prompt, unless that one is too busy."""

    _num_routed = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas to try, the best first."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        route = _route_of(pending_request)
        named = [replica for replica in candidate_replicas if _name(replica) == route.replica_id]
        if named:
            return [named]
        self._num_routed += 1
        turn = self._num_routed % len(candidate_replicas)  # so that idle replicas take turns
        replicas = [*candidate_replicas[turn:], *candidate_replicas[:turn]]
        candidates = [
            Candidate(
                max(route.loads.get(_name(replica), 0), self.replica_queue_len_cache.get(replica.replica_id) or 0),
                route.max_num_seqs,
                Overlap(*route.overlaps.get(_name(replica), (0, 0))),
            )
            for replica in replicas
        ]
        return [[replicas[index]] for index in ranked(candidates, route.prompt_len, route.num_samples)]


def _name(replica: RunningReplica) -> str:
    name: str = replica.replica_id.unique_id
    return name


def _route_of(pending_request: PendingRequest) -> Route:
    arguments: list[Any] = list(pending_request.args)
    return arguments[0] if arguments and isinstance(arguments[0], Route) else Route()
