"""An MTP drafter on the Triton backend, in Triton's interpreter, drafts the same tokens as transformers."""

from __future__ import annotations

import pytest

from tests.interpreting import INTERPRETED, run_interpreted

pytest.importorskip("triton")

if not INTERPRETED:

    @pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
    def test_drafts_in_the_interpreter(marked: str) -> None:
        run_interpreted(__file__, marked)

else:
    from culet.attention.triton import TritonBackend
    from culet.kernels.triton.attention import tiles
    from tests.models import tiny_assistants
    from tests.models import tiny_checkpoints as tiny
    from tests.models.draft_rig import DraftRig
    from tests.models.test_mtp import assert_same_logits

    MORE = [pytest.param(*case, marks=pytest.mark.slow) for case in (("E4B", "engine"), ("31B", "hf"))]

    @pytest.mark.parametrize(("shape", "position"), [("31B", "engine"), *MORE])
    def test_drafts(shape: str, position: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Sliding and global pages, with K and V separate and in the latent, shorter and longer than the window."""
        monkeypatch.setattr(tiles, "device_facts", lambda device: (90, 4))  # a small GPU, so that few programs are idle
        prompts = [tiny.telling_prompt(shape, length) for length in (3, 2 * tiny.WINDOW + 5)]
        rig = DraftRig(shape, position=position, page_tokens=16, backend=TritonBackend)
        tokens, logits_RKV = rig.drafts(prompts, [9, 11], 2)
        for row, token_ids in enumerate(prompts):
            want_tokens, want_KV = tiny_assistants.oracle_drafts(shape, token_ids, (9, 11)[row], 2, position)
            assert_same_logits(logits_RKV[row], want_KV)
            assert tokens[row] == want_tokens
