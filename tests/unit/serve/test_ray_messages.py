"""Media cross to Ray's replicas beside their request, without being packed."""

from __future__ import annotations

import pickle
from dataclasses import replace

from culet.media.items import MediaItem, MediaKind
from culet.serve.process.wire import submit_frames
from culet.serve.ray.messages import pack_order, unpack_order
from culet.types import MediaSpan
from tests.engine.scheduler.drive import make_request


def test_contents_are_not_packed() -> None:
    contents = [bytes(range(256)) * 4000, b"\x01" * 1_000_000]
    items = tuple(MediaItem(MediaKind.IMAGE, b"%d" % n, 4, (2, 2), data) for n, data in enumerate(contents))
    spans = tuple(MediaSpan(1 + 4 * n, 4, item.key) for n, item in enumerate(items))
    request = replace(make_request("a", [1] * 10, media=spans), items=items)
    order, buffers = pack_order(request, 2.5)
    assert len(order) < 2000
    beside: list[pickle.PickleBuffer] = []
    inside = pickle.dumps((order, buffers), protocol=5, buffer_callback=beside.append)  # as Ray does
    assert len(inside) < 3000
    found = unpack_order(*pickle.loads(inside, buffers=[memoryview(each) for each in beside]))
    assert found.left_s == 2.5
    assert found.request == request
    assert b"".join(submit_frames(found.request)) == b"".join(submit_frames(request))
