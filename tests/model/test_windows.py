"""Windows and batch plans: every token once, enough context, nothing but the counts decides."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vocagnolm.model.nll import cut_windows, plan_batches


@given(tokens=st.integers(0, 500), room=st.integers(2, 80), data=st.data())
def test_every_token_once_with_its_context(tokens, room, data):
    stride = data.draw(st.integers(1, room - 1))
    windows = cut_windows(0, tokens, room=room, stride=stride)
    scored = [t for w in windows for t in range(w.first_scored, w.stop)]
    assert scored == list(range(tokens))
    for window in windows:
        assert len(window) <= room
        assert window.first_scored - window.start >= min(stride, window.first_scored)


@pytest.mark.parametrize("stride", [-1, 64])
def test_a_stride_must_leave_room(stride):
    with pytest.raises(ValueError, match="stride"):
        cut_windows(0, 100, room=64, stride=stride)


@settings(max_examples=50)
@given(counts=st.lists(st.integers(1, 900), min_size=1, max_size=60))
def test_a_plan_holds_every_window_once_in_rows_that_fit(counts):
    batches = plan_batches(counts, context=256, stride=32, prefix_tokens=1, batch_tokens=1024)
    windows = [w for b in batches for w in b.windows]
    expected = [w for i, n in enumerate(counts) for w in cut_windows(i, n, room=255, stride=32)]
    assert sorted(windows, key=lambda w: (w.document, w.start)) == expected
    for batch in batches:
        assert max(len(w) for w in batch.windows) + 1 <= batch.row_tokens <= 256
        assert len(batch.windows) * batch.row_tokens <= 1024
    lengths = [b.row_tokens for b in batches]
    assert lengths == sorted(lengths, reverse=True)


def test_a_realistic_plan_wastes_little():
    import random

    draw = random.Random(0)
    counts = [max(1, int(draw.lognormvariate(6.3, 1.3))) for _ in range(1024)]
    batches = plan_batches(counts, context=2048, stride=256, prefix_tokens=0, batch_tokens=16384)
    real = sum(len(w) for b in batches for w in b.windows)
    assert real / sum(len(b.windows) * b.row_tokens for b in batches) > 0.93
