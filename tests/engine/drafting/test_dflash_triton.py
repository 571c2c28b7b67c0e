"""A DFlash drafter on our Triton backend, in Triton's interpreter, gives the same blocks as the dense oracle."""

from __future__ import annotations

import pytest

from tests.interpreting import INTERPRETED, run_interpreted

pytest.importorskip("triton")

if not INTERPRETED:

    @pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
    def test_blocks_in_the_interpreter(marked: str) -> None:
        run_interpreted(__file__, marked)

else:
    from culet.attention.triton import TritonBackend
    from culet.kernels.triton.attention import tiles
    from tests.engine.drafting.dflash_rig import Rig, assert_like_oracle, make_pair, make_request
    from tests.engine.runner.real_steps import make_prompt

    @pytest.mark.parametrize("is_causal", [None, pytest.param(False, marks=pytest.mark.slow)])
    def test_blocks(tmp_path, monkeypatch, is_causal) -> None:
        """Sliding and full layers, non-causal as published and everywhere, after a chunk and after rejected drafts."""
        monkeypatch.setattr(tiles, "device_facts", lambda device: (90, 4))  # a small GPU, so that few programs are idle
        own = {"mask_token_id": 4, "target_layer_ids": [0, 2, 5]}
        if is_causal is not None:
            own["is_causal"] = is_causal
        # More than 16 packed rows, as published drafters have, use the tile for blocks.
        pair = make_pair(tmp_path, "31B", dflash_config=own, num_key_value_heads=1)
        asked = [make_request("long", make_prompt(33), 4)]
        if is_causal is not None:
            asked.append(make_request("short", make_prompt(2), 4))
        rig = Rig(pair, budget=30, backend=TritonBackend)
        assert rig.run(*asked) == Rig(pair, drafts=False).run(*asked)
        assert_like_oracle(pair, rig.rounds, at_least=2)
