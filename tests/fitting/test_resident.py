"""Batches that lie on a device: order, resumption, what they refuse."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bayeszip.errors import DataError
from bayeszip.fitting import ResidentBatches


def taken(batches: ResidentBatches, count: int | None = None) -> list[list[int]]:
    found = []
    for _, (_, targets) in zip(range(len(batches) if count is None else count), batches, strict=False):
        assert isinstance(targets, torch.Tensor)
        found.append(targets.tolist())
    return found


class TestBatches:
    @pytest.fixture
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(20.0).reshape(10, 2), torch.arange(10)

    @settings(deadline=None, max_examples=60)
    @given(n=st.integers(0, 30), size=st.integers(1, 12), shuffle=st.booleans(), drop_last=st.booleans())
    def test_each_example_once_a_pass(self, n, size, shuffle, drop_last):
        x = torch.arange(n, dtype=torch.float32).reshape(n, 1) * 3
        batches = ResidentBatches(x, torch.arange(n), size, shuffle=shuffle, drop_last=drop_last)
        given_ = list(batches)
        assert len(given_) == len(batches)
        assert batches.n_examples == n
        assert all(torch.equal(x[:, 0], y * 3.0) for x, y in given_)
        rows = [row for _, y in given_ for row in y.tolist()]
        kept = n - n % size if drop_last else n
        assert len(rows) == len(set(rows)) == kept
        assert all(len(y) == size for _, y in given_[:-1])
        if not shuffle:
            assert rows == list(range(kept))

    def test_passes_differ_and_seeds_repeat_them(self, tensors):
        first, same, other = (ResidentBatches(*tensors, 4, shuffle=True, seed=seed) for seed in (5, 5, 6))
        passes = [taken(first) for _ in range(3)]
        assert passes == [taken(same) for _ in range(3)]
        assert len({str(one) for one in passes}) == 3
        assert passes[0] != taken(other)

    def test_other_random_numbers_don_t_matter_and_are_not_drawn(self, tensors):
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)
        order = taken(ResidentBatches(*tensors, 4, shuffle=True, seed=5))
        assert torch.equal(torch.rand(3), expected)
        assert order == taken(ResidentBatches(*tensors, 4, shuffle=True, seed=5))

    @pytest.mark.parametrize("stop", range(8))
    @pytest.mark.parametrize("shuffle", [True, False])
    def test_resuming_continues_exactly(self, tensors, stop, shuffle):
        """Stopped after any number of batches, within a pass or between passes."""
        whole, stopped = (ResidentBatches(*tensors, 4, shuffle=shuffle, seed=5) for _ in range(2))
        expected = [batch for _ in range(4) for batch in taken(whole)]
        before, state = [], stopped.state_dict()
        for _ in range(4):
            for _, y in stopped:
                if len(before) == stop:
                    break
                before.append(y.tolist())
                state = stopped.state_dict()
            if len(before) == stop:
                break
        resumed = ResidentBatches(*tensors, 4, shuffle=shuffle, seed=99)
        resumed.load_state_dict(state)
        after = [y.tolist() for _ in range(4) for _, y in resumed]
        assert (before + after)[: len(expected)] == expected

    def test_a_state_taken_between_passes_starts_the_next(self, tensors):
        batches = ResidentBatches(*tensors, 4, shuffle=True, seed=5)
        taken(batches)
        list(batches)
        state = batches.state_dict()
        assert state["given"] == 0
        expected = [taken(batches), list(batches) and taken(batches)]
        batches.load_state_dict(state)
        assert [taken(batches), list(batches) and taken(batches)] == expected

    def test_leaving_a_pass_early_starts_a_new_one_next(self, tensors):
        batches = ResidentBatches(*tensors, 4, shuffle=True)
        next(iter(batches))
        assert sorted(row for _, y in batches for row in y.tolist()) == list(range(10))

    def test_a_state_survives_a_file(self, tensors, tmp_path):
        batches = ResidentBatches(*tensors, 4, shuffle=True, seed=5)
        next(iter(batches))
        torch.save(batches.state_dict(), tmp_path / "state")
        resumed = ResidentBatches(*tensors, 4, shuffle=True)
        resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
        assert taken(resumed) == taken(ResidentBatches(*tensors, 4, shuffle=True, seed=5))[1:]

    def test_states_that_do_not_fit(self, tensors):
        batches = ResidentBatches(*tensors, 4)
        with pytest.raises(DataError, match="stands at batch 9, but a pass has 3; was the batch size changed"):
            batches.load_state_dict({"generator": batches.state_dict()["generator"], "given": 9})
        with pytest.raises(DataError, match="the random state does not fit cpu"):
            batches.load_state_dict({**batches.state_dict(), "generator": torch.zeros(3, dtype=torch.uint8)})

    def test_bad_arguments(self, tensors):
        x, y = tensors
        with pytest.raises(DataError, match="10 inputs and 9 targets"):
            ResidentBatches(x, y[:9], 4)
        with pytest.raises(DataError, match="at least 1 example, not 0"):
            ResidentBatches(x, y, 0)
        with pytest.raises(DataError, match="inputs on cpu and targets on meta"):
            ResidentBatches(x, y.to("meta"), 4)

    @pytest.mark.gpu
    @pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    def test_a_gpu_is_never_waited_for(self, tensors):
        x, y = (tensor.cuda() for tensor in tensors)
        batches = ResidentBatches(x, y, 4, shuffle=True, seed=5)
        torch.cuda.set_sync_debug_mode("error")
        try:
            given_ = [batch for _ in range(3) for batch in batches]
            batches.load_state_dict(batches.state_dict())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(batch.inputs.is_cuda and batch.targets.is_cuda for batch in given_)
