"""A draft round as a GPU runs it, in Triton's interpreter: the drafts match the eager round's, and only our few kernels run."""

from __future__ import annotations

import pytest

from tests.interpreting import INTERPRETED, run_interpreted

pytest.importorskip("triton")

if not INTERPRETED:

    @pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
    def test_rounds_in_the_interpreter(marked: str) -> None:
        run_interpreted(__file__, marked)

else:
    from collections import Counter
    from collections.abc import Callable
    from typing import Any

    import torch
    from torch import Tensor, nn
    from torch.utils._python_dispatch import TorchDispatchMode

    import culet.layers.weight.plain
    from culet.attention.batch import GroupBatch
    from culet.attention.torch_cpu import TorchCPUBackend
    from culet.attention.triton import TritonBackend
    from culet.cache.pool import Pool
    from culet.cache.spec import plan_cache
    from culet.config import DraftChoice
    from culet.drafters.base import Drafter, open_drafter
    from culet.kernels import dispatch
    from culet.kernels.triton.attention import tiles
    from culet.kernels.triton.launch import Launch
    from culet.models import embedded
    from culet.models.checkpoint import open_checkpoint
    from culet.models.weights import load_model
    from culet.runner.deferred_kv import DeferredKV
    from culet.runner.draft_round import propose

    CPU = torch.device("cpu")
    FOLDERS = {"mtp": "assistant", "dflash": "dflash"}
    LENGTHS = (40, 1)  # the last row pads the round
    # Operations that compute nothing, and the buffer for attention's sums, which is allocated at first use.
    FREE = ("view", "slice", "select", "empty", "split", "expand", "squeeze", "transpose", "unbind", "flatten", "zeros")

    class Watch(TorchDispatchMode):
        """Counts what would run on a GPU: launches by kernel name, and torch operations."""

        def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
            super().__init__()
            self.kernels: Counter[str] = Counter()
            self.others: Counter[str] = Counter()
            self._is_inside = False
            run = Launch.run

            def launched(launch: Launch) -> None:
                self.kernels[launch.kernel.fn.__name__] += 1
                self._is_inside = True  # the interpreter uses torch too
                run(launch)
                self._is_inside = False

            monkeypatch.setattr(Launch, "run", launched)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            if not self._is_inside and not any(word in name for word in FREE):
                self.others[name] += 1
            return func(*args, **(kwargs or {}))

    class Rig:
        """The built-in model with one of its drafters, over pages of random numbers."""

        def __init__(self, method: str, backend: type) -> None:
            checkpoint = open_checkpoint(str(embedded.FOLDER / "target"))
            target = load_model(checkpoint, dtype=torch.float32, device=CPU, progress=False)
            choice = DraftChoice(method, str(embedded.FOLDER / FOLDERS[method]))
            spec = open_drafter(choice, checkpoint.spec)
            layout = plan_cache(checkpoint.spec.kv_specs(4) + spec.kv_specs(4))
            self.pool = Pool(layout, 24, torch.float32, CPU, has_spare=True)
            generator = torch.Generator().manual_seed(3)
            self.pool._slabs.view(torch.float32)[:24].copy_(torch.randn(24, layout.slab_bytes // 4, generator=generator))
            readers = spec.readers(layout)
            backends = {group.index: backend(group, spec.num_heads) for group in layout.groups if group.name in readers}
            self.drafter: Drafter = spec.build(target, backends, progress=False)
            groups, pages = [], iter(list(range(24)) * 20)
            for group in layout.groups:
                columns = -(-max(LENGTHS) - 16) // group.page_tokens + 2
                table = torch.tensor([[next(pages) for _ in range(columns)] for _ in LENGTHS], dtype=torch.int32)
                table[-1] = self.pool.spare_page  # type: ignore[call-overload]
                groups.append(GroupBatch(table, torch.zeros(len(LENGTHS), dtype=torch.int32), torch.zeros(0).long()))
            self.groups = tuple(groups)
            self.tokens_SL = torch.randint(5, 8000, (4, 64), generator=generator, dtype=torch.int32)
            self.facts_4R = torch.tensor([[2, 3], [0, 1], [0, 0], LENGTHS])  # slot 3 is the spare one
            self.hidden_RD = torch.randn(2, 256, generator=generator)
            self.taps = {tap: torch.randn(3, 256, generator=generator) for tap in self.drafter.taps}

        @torch.inference_mode()
        def draft(self, num_drafts: int) -> Tensor:
            return propose(self.drafter, self.pool, self.tokens_SL, self.facts_4R, self.hidden_RD, self.groups, num_drafts)

        @torch.inference_mode()
        def write(self) -> Tensor:
            """Keep features in a ring and write context, except that of the last token."""
            deferred = DeferredKV.create(self.drafter, self.pool, 4, 256, torch.float32, CPU)
            assert deferred is not None
            deferred.keep(self.taps, torch.tensor([3, 40, 70]))
            self.drafter.commit(self.taps, torch.tensor([5, 9, 1]), torch.tensor([17, 33, -1]), self.pool)
            return deferred.ring_SNX

    @pytest.fixture
    def on_gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Rig]:
        """Return a function that makes a rig with the GPU's operations and weights laid out as on a GPU."""

        def make(method: str) -> Rig:
            with monkeypatch.context() as patch:
                patch.setitem(dispatch.KERNELS, "cpu", dispatch.TRITON)
                patch.setattr(culet.layers.weight.plain, "empty_matrix", empty_matrix)
                return Rig(method, TritonBackend)

        def empty_matrix(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)

        monkeypatch.setattr(tiles, "device_facts", lambda device: (90, 4))  # a small GPU, so that few programs are idle
        return make

    MORE = [pytest.param(*case, marks=pytest.mark.slow) for case in (("mtp", 2, 35), ("dflash", 7, 24))]

    @pytest.mark.parametrize(("method", "count", "most"), [("mtp", 1, 19), *MORE])
    def test_rounds(
        method: str, count: int, most: int, on_gpu_kernels: Callable[[str], Rig], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A round of `count` drafts takes at most `most` kernels, without attention's second kernel for split rows."""
        rig, eager = on_gpu_kernels(method), Rig(method, TorchCPUBackend)
        wanted = eager.draft(count)
        monkeypatch.setitem(dispatch.KERNELS, "cpu", dispatch.TRITON)  # the round's own operations
        watch = Watch(monkeypatch)
        with watch:
            made = rig.draft(count)
        assert not watch.others, f"torch launches {dict(watch.others)}"
        assert watch.kernels.total() - watch.kernels["_join"] <= most, dict(watch.kernels)
        assert torch.equal(made[:-1], wanted[:-1])
        assert rig.tokens_SL[2, LENGTHS[0] + 1 : LENGTHS[0] + 1 + count].tolist() == made[0].tolist()
        assert torch.equal(rig.tokens_SL[:3], eager.tokens_SL[:3])
        assert not rig.pool._slabs[24].any(), "the spare page was written"

    def test_features(on_gpu_kernels: Callable[[str], Rig], monkeypatch: pytest.MonkeyPatch) -> None:
        rig, eager = on_gpu_kernels("dflash"), Rig("dflash", TorchCPUBackend)
        wanted = eager.write()
        monkeypatch.setitem(dispatch.KERNELS, "cpu", dispatch.TRITON)
        watch = Watch(monkeypatch)
        with watch:
            ring = rig.write()
        assert torch.equal(ring, wanted)
        assert (rig.pool._slabs.view(torch.float32) - eager.pool._slabs.view(torch.float32)).abs().max() < 1e-4
        assert watch.kernels.total() == 4, dict(watch.kernels)  # one keeps features; three write context
