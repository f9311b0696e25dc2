"""Draws against the inverse of the distribution written out; losses and alternatives against
`log_softmax` and `topk`; the GPU's kernels against the reference."""

import os

import numpy as np
import pytest
import torch

from vocagnolm.alternatives import Alternatives
from vocagnolm.generate.draw import GROUP, Sampling, choose, grouped
from vocagnolm.model.nll import uniform_numbers


def logits(rows, columns, seed=0, spread=3.0):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=random) * spread


def naive(z, u, temperature, top_p):
    """The first id whose running probability passes the number; of the nucleus, in id order."""
    p = torch.softmax(z.double() / temperature, -1)
    if top_p < 1:
        order = p.argsort(descending=True)
        needed = int(((p[order].cumsum(0) - p[order]) < top_p).sum())
        kept = torch.zeros_like(p)
        kept[order[:needed]] = p[order[:needed]]
        p = kept
    running = p.cumsum(0)
    return int(torch.searchsorted(running, u * running[-1], right=True))


@pytest.mark.parametrize("columns", [5, GROUP, 3 * GROUP + 17, 5000])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.5, 0.9), (0.3, 0.5)])
def test_draws_are_the_inverse_in_the_order_of_ids(columns, temperature, top_p):
    z, seeds = logits(200, columns), torch.arange(200) * 7919 + columns
    drawn = choose(z, seeds, columns, Sampling(temperature, top_p))
    u = uniform_numbers(seeds, 1)[:, 0]
    expected = [naive(z[n], u[n], temperature, top_p) for n in range(len(z))]
    # a number that lies on a border may fall on either side of it
    assert sum(a != b for a, b in zip(drawn.ids.tolist(), expected, strict=True)) <= 1
    nll = -z.double().log_softmax(-1)[torch.arange(200), drawn.ids]
    np.testing.assert_allclose(drawn.nll, nll, atol=1e-5)


def test_only_ids_that_the_tokenizer_knows_are_drawn():
    z = logits(500, 300)
    z[:, 290:] += 8.0
    for sampling in (Sampling(0.0), Sampling(1.0), Sampling(1.0, 0.8)):
        drawn = choose(z, torch.arange(500), 290, sampling)
        assert int(drawn.ids.max()) < 290
        nll = -z.log_softmax(-1)[torch.arange(500), drawn.ids]  # of the model as it is
        torch.testing.assert_close(drawn.nll, nll, atol=1e-4, rtol=1e-5)


def test_greedy_is_the_likeliest_and_the_first_of_equals():
    z = logits(50, 1000)
    z[0, [17, 400, 900]] = 30.0
    ids = choose(z, torch.arange(50), 1000, Sampling()).ids
    assert ids.tolist() == z.argmax(1).tolist() and int(ids[0]) == 17


def test_shares_of_draws():
    z = torch.log(torch.tensor([0.1, 0.5, 0.3, 0.1])).expand(8000, 4)

    def shares(temperature, top_p):
        ids = choose(z, torch.arange(8000), 4, Sampling(temperature, top_p)).ids
        return torch.bincount(ids, minlength=4) / 8000

    torch.testing.assert_close(
        shares(1.0, 1.0), torch.tensor([0.1, 0.5, 0.3, 0.1]), atol=0.02, rtol=0
    )
    torch.testing.assert_close(
        shares(1.0, 0.7), torch.tensor([0.0, 0.625, 0.375, 0.0]), atol=0.02, rtol=0
    )
    assert shares(0.5, 0.6)[1] == 1  # 0.25 : 0.09, and 0.69 of all
    flat = choose(torch.zeros(8000, 3000), torch.arange(8000), 3000, Sampling(1.0, 0.9)).ids
    assert len(flat.unique()) > 2700  # equal tokens are in or out together


@pytest.mark.parametrize("count", [1, 4, 16])
def test_alternatives_are_the_likeliest(count):
    z = logits(40, 1000)
    drawn = choose(z, torch.arange(40), 1000, Sampling(1.0), count)
    given = Alternatives(drawn.packed.numpy().view(np.uint32))
    values, ids = z.log_softmax(-1).topk(count)
    np.testing.assert_array_equal(given.ids, ids)
    np.testing.assert_allclose(given.probability, values.exp(), rtol=0.005, atol=1e-6)
    np.testing.assert_array_equal(given.follows, ids.numpy() == drawn.ids[:, None].numpy())


def test_a_vocabulary_smaller_than_its_groups():
    drawn = choose(logits(9, 20), torch.arange(9), 20, Sampling(1.0), 16)
    assert drawn.packed.shape == (9, 16)
    assert (Alternatives(drawn.packed.numpy().view(np.uint32)).ids < 20).all()


def test_a_row_draws_alike_beside_any_others():
    z, seeds = logits(16, 777), torch.arange(16) * 31
    whole = choose(z, seeds, 777, Sampling(0.8), 4)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(3))
    moved = choose(z[order], seeds[order], 777, Sampling(0.8), 4)
    for a, b in zip(whole, moved, strict=True):
        assert torch.equal(a[order], b)


@pytest.mark.parametrize(("temperature", "top_p"), [(-0.1, 1.0), (1.0, 0.0), (1.0, 1.5)])
def test_impossible_sampling_is_refused(temperature, top_p):
    with pytest.raises(ValueError):
        Sampling(temperature, top_p)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(not INTERPRETED, reason="needs a GPU, or TRITON_INTERPRET=1 and triton")
@pytest.mark.parametrize("columns", [7, GROUP, 40 * GROUP + 1])
def test_the_kernel_gives_the_same_sums(columns):
    from vocagnolm.generate.triton_groups import triton_grouped

    z = logits(3, columns)
    z[1, : columns // 2] = float("-inf")
    for ours, expected in zip(triton_grouped(z, 0.7), grouped(z, 0.7), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.7, 1.0), (1.0, 0.9)])
def test_a_gpu_draws_as_a_cpu(temperature, top_p):
    z, seeds = logits(256, 152_000), torch.arange(256) * 7919
    here = choose(z, seeds, 151_000, Sampling(temperature, top_p), 16)
    there = choose(z.cuda(), seeds.cuda(), 151_000, Sampling(temperature, top_p), 16)
    assert (here.ids != there.ids.cpu()).sum() <= 1
    same = here.ids == there.ids.cpu()
    torch.testing.assert_close(here.nll[same], there.nll.cpu()[same], atol=1e-4, rtol=1e-5)
