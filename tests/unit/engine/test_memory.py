"""How many tokens a cache holds, from configs alone."""

from __future__ import annotations

import pytest

from culet.cache.spec import plan_cache
from culet.engine.memory import least_slabs, most_tokens
from culet.models.spec import read_spec
from culet.models.variants import VARIANTS


@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_that_fit_at_the_same_time(name: str) -> None:
    """Sequences fill the cache as the scheduler counts their pages. Short ones hold less, because each has a window."""
    layout = plan_cache(read_spec(VARIANTS[name]).kv_specs(2, latent=True))
    totals = []
    for max_len in (2000, 32768, 131072):
        each = least_slabs(layout, max_len)
        assert most_tokens(layout, 7 * each, max_len) == 7 * max_len
        assert most_tokens(layout, 7 * each + least_slabs(layout, 500), max_len) >= 7 * max_len + 500
        assert most_tokens(layout, least_slabs(layout, 500), max_len) >= 500
        totals.append(most_tokens(layout, 20_000, max_len))
    assert totals == sorted(totals)
    pages_of_all_layers = 20_000 * max(group.page_tokens for group in layout.groups)
    assert totals[0] < 0.7 * pages_of_all_layers
    assert totals[-1] < pages_of_all_layers
