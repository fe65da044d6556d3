"""The noise is one fixed function of integers, is as random as noise must be, and makes `choose` follow p.

Seeds are fixed, so a test passes always or never. "False alarm" is the probability that noise without any
fault would have failed it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from outpace import noise
from outpace.noise import COIN, COUPLED, DRAFT, choose, coin, gumbel, perturbed, uniform

TOKENS = torch.arange(100_000)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Splitting rows of this size over the threads of a busy machine takes much longer than computing them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --------------------------------------------------------------------------------------------------
# One function of integers


def test_noise_of_a_token_depends_on_no_other_token() -> None:
    """Any shape, any order, any subset, alone or in a batch: a token id has the same noise, bit by bit."""
    whole = gumbel(3, 14, TOKENS)
    shuffled = TOKENS[torch.randperm(len(TOKENS), generator=torch.Generator().manual_seed(1))]
    assert torch.equal(gumbel(3, 14, shuffled), whole[shuffled])
    assert torch.equal(gumbel(3, 14, TOKENS.view(10, 100, 100)).flatten(), whole)
    assert torch.equal(gumbel(3, 14, TOKENS[::7]), whole[::7])
    for token in (0, 1, 49_999, 99_999):
        assert gumbel(3, 14, torch.tensor(token)).item() == whole[token].item()
    assert torch.equal(gumbel(3, 14, torch.tensor([5, 5])), whole[[5, 5]])
    assert gumbel(3, 14, torch.tensor([], dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_noise_does_not_depend_on_the_width_of_the_ids(dtype: torch.dtype) -> None:
    """Ids in a narrow integer type do not overflow into other noise."""
    ids = torch.arange(200)
    assert torch.equal(uniform(3, 14, ids.to(dtype)), uniform(3, 14, ids))
    assert torch.equal(gumbel(3, 14, ids.to(dtype), DRAFT), gumbel(3, 14, ids, DRAFT))


def test_noise_does_not_depend_on_torchs_random_state() -> None:
    """Nothing is drawn: seeding torch changes nothing, and computing noise leaves torch's state alone."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = gumbel(5, 6, TOKENS[:100])
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(gumbel(5, 6, TOKENS[:100]), first)


@pytest.mark.parametrize(
    ("seed", "position", "stream", "uniforms", "gumbels"),
    [
        (0, 0, COUPLED, [0.7682768830978309, 0.12964561829974752], [1.3333031823784145, -0.7143951177675679]),
        (0, 1, COUPLED, [0.9990279822513312, 0.40888044555588665], [6.935650287896781, 0.11167767716810086]),
        (1, 0, COUPLED, [0.3653939715533242, 0.8847898165349132], [-0.006756258385219094, 2.100418772361179]),
        (0, 0, DRAFT, [0.0955976752298221, 0.7782281590822414], [-0.8533964164333272, 1.3833565439527573]),
        (
            2**63 + 11,
            10**6,
            COIN,
            [0.8779308624171417, 0.8868064081063368],
            [2.038780075777619, 2.119192650093998],
        ),
    ],
)
def test_noise_never_changes(
    seed: int, position: int, stream: int, uniforms: list[float], gumbels: list[float]
) -> None:
    """Golden values to the last bit: another value would change every text that is reproduced by its seed."""
    assert uniform(seed, position, torch.tensor([0, 1]), stream).tolist() == uniforms
    assert gumbel(seed, position, torch.tensor([0, 1]), stream).tolist() == gumbels


def test_noise_of_large_ids_and_the_coins_never_change() -> None:
    """Golden values for ids of large vocabularies and beyond 32 bits, and for a coin."""
    large = torch.tensor([151_935, 2**31 - 1, 2**40])
    assert uniform(3, 4, large).tolist() == [0.25501772785057597, 0.5330935022156148, 0.4428056040527494]
    assert coin(1, 2, 3) == 0.10578834039621199
    assert coin(1, 2, 3) == uniform(1, 2, torch.tensor(3), COIN).item()


def splitmix(seed: int, position: int, token: int, stream: int) -> float:
    """The definition in the module's docstring, in Python's own integers."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x &= mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    key = mix(mix(seed + golden * (stream + 1)) + golden * (position + 1))
    return ((mix(mix(token * golden + key) + golden) >> 12) + 0.5) / 2**52


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**62 + 3, 2**63 - 1, 2**63, 2**64 - 1, 2**64 + 5, 2**100])
def test_noise_is_the_hash_that_its_docstring_defines(seed: int) -> None:
    """Signed arithmetic in torch is the unsigned hash, for seeds of any size; seeds count modulo 2^64."""
    ids = [0, 1, 2, 255, 256, 50_256, 151_935, 2**31, 2**33 + 1]
    for position, stream in itertools.product((0, 1, 4095, 2**20, 2**40), (COUPLED, DRAFT, COIN, 77)):
        wanted = [splitmix(seed, position, token, stream) for token in ids]
        assert uniform(seed, position, torch.tensor(ids), stream).tolist() == wanted
    assert torch.equal(uniform(seed, 3, TOKENS[:10]), uniform(seed % 2**64, 3, TOKENS[:10]))


# --------------------------------------------------------------------------------------------------
# The logarithm


def relative_error(x: np.ndarray) -> float:
    wanted = np.log(x.astype(np.longdouble))
    return float(np.max(np.abs((noise._log(torch.from_numpy(x)).numpy() - wanted) / wanted)))


def test_the_logarithm_is_right_to_the_last_digits() -> None:
    """Against 80-bit arithmetic, relative error below 1e-15: in (0, 1), around 1, and over all exponents."""
    if np.finfo(np.longdouble).eps > 1e-18:
        pytest.skip("this machine has no longer floats to compare with")
    rng = np.random.default_rng(1)
    assert relative_error(rng.random(100_000)) <= 1e-15
    assert relative_error(1 - 10.0 ** rng.uniform(-15.5, -1, 100_000)) <= 1e-15
    assert relative_error(1 + 10.0 ** rng.uniform(-15, -1, 100_000)) <= 1e-15
    assert relative_error(10.0 ** rng.uniform(-307, 308, 100_000)) <= 1e-15
    powers = np.exp2(np.arange(-1022.0, 1024.0))
    assert relative_error(powers[powers != 1]) <= 1e-15
    around = np.nextafter(np.sqrt(0.5), [0.0, 1.0])  # where the range reduction switches
    assert relative_error(np.concatenate([around, around * 2, around / 1024])) <= 1e-15


def test_the_logarithm_of_one_is_zero_and_negative_exponents_are_negative() -> None:
    assert noise._log(torch.tensor([1.0], dtype=torch.float64)).item() == 0
    powers = 2.0 ** torch.arange(-1022, 0, dtype=torch.float64)
    assert bool((noise._log(powers) < 0).all())
    # Subnormal numbers too, although no uniform number is that small.
    assert noise._log(torch.tensor([5e-324], dtype=torch.float64)).item() == pytest.approx(-744.4400719213812)


def test_gumbel_numbers_are_finite_and_right_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """-log(-log u) for the smallest, the largest and many uniform numbers, to 2e-15."""
    ends = np.concatenate([[0.5], 2.0 ** np.arange(1, 52), 2.0**52 - 2.0 ** np.arange(0, 52)]).astype(np.int64)
    bits = torch.from_numpy(np.concatenate([[0, 2**52 - 1], ends]))
    monkeypatch.setattr(noise, "_bits", lambda *ignored: bits)
    u = uniform(0, 0, bits)
    assert bool(((u > 0) & (u < 1)).all())
    found = gumbel(0, 0, bits).numpy()
    exact = u.numpy().astype(np.longdouble)
    wanted = -np.log(-np.log(exact))
    assert np.isfinite(found).all()
    assert float(np.max(np.abs(found - wanted) / np.maximum(1, np.abs(wanted)))) <= 2e-15


# --------------------------------------------------------------------------------------------------
# As random as noise must be


@pytest.mark.parametrize("stream", [COUPLED, DRAFT, COIN])
def test_noise_has_the_right_distribution(stream: int) -> None:
    """Kolmogorov-Smirnov, mean and variance over tokens, positions and seeds. False alarm: below 1e-5."""
    over_positions = torch.stack([uniform(7, position, TOKENS[:50], stream) for position in range(2000)])
    over_seeds = torch.stack([uniform(seed, 7, TOKENS[:50], stream) for seed in range(2000)])
    for sample in (uniform(7, 7, TOKENS, stream), over_positions.flatten(), over_seeds.flatten()):
        assert stats.kstest(sample.numpy(), "uniform").pvalue > 1e-6
        assert abs(sample.mean().item() - 0.5) < 5 * (1 / 12 / len(sample)) ** 0.5
        assert abs(sample.var().item() - 1 / 12) < 5 * (1 / 180 / len(sample)) ** 0.5
    sample = gumbel(7, 7, TOKENS, stream)
    assert stats.kstest(sample.numpy(), "gumbel_r").pvalue > 1e-6
    variance = np.pi**2 / 6
    assert abs(sample.mean().item() - np.euler_gamma) < 5 * (variance / len(sample)) ** 0.5
    assert abs(sample.var().item() - variance) < 5 * (4.4 * variance**2 / len(sample)) ** 0.5  # kurtosis 5.4


def test_every_bit_is_fair_and_independent_of_every_other() -> None:
    """52 bits and their 1326 pairs, over 100,000 tokens, within 6 standard errors. False alarm: 3e-6."""
    numbers = noise._bits(11, 3, TOKENS, COUPLED)
    signs = torch.stack([(numbers >> bit & 1) * 2 - 1 for bit in range(52)]).to(torch.float64)
    limit = 6 / len(TOKENS) ** 0.5
    assert signs.mean(1).abs().max() < limit
    assert ((signs @ signs.T) / len(TOKENS) - torch.eye(52)).abs().max() < limit


def neighbours() -> list[tuple[str, Tensor]]:
    """Noise vectors whose integers differ as little as can be, all from the first one."""
    found = [("itself", uniform(5, 100, TOKENS))]
    for change in (1, 2, 3, 16, 256, 2**16, 2**31, 2**32, 2**33, 2**63):
        found.append((f"seed + {change}", uniform(5 + change, 100, TOKENS)))
    for change in (1, 2, 3, 16, 64, 256, 2**16):
        found.append((f"position + {change}", uniform(5, 100 + change, TOKENS)))
        found.append((f"token + {change}", uniform(5, 100, TOKENS + change)))
    found += [(f"stream {stream}", uniform(5, 100, TOKENS, stream)) for stream in (DRAFT, COIN, 3, 4)]
    found += [
        ("seed and position swapped", uniform(100, 5, TOKENS)),
        ("seed - 1, position + 1", uniform(4, 101, TOKENS)),
    ]
    return found


def test_noise_of_neighbouring_seeds_positions_tokens_and_streams_is_independent() -> None:
    """All pairs of neighbours are uncorrelated, and each is independent of the first one.

    Correlations within 6 standard errors (false alarm 2e-6); chi-square on a 16 x 16 grid (false alarm 3e-6).
    """
    vectors = neighbours()
    table = torch.stack([vector for _, vector in vectors])
    correlations = torch.corrcoef(table) - torch.eye(len(vectors))
    assert correlations.abs().max() < 6 / len(TOKENS) ** 0.5
    large = torch.corrcoef(-(-table.log()).log()) - torch.eye(len(vectors))
    assert large.abs().max() < 6 / len(TOKENS) ** 0.5
    first = (table[0] * 16).long()
    for name, vector in vectors[1:]:
        cells = torch.bincount(first * 16 + (vector * 16).long(), minlength=256)
        assert stats.chisquare(cells.numpy()).pvalue > 1e-7, name


def test_coins_of_a_round_are_independent_of_each_other_and_of_the_drafts_noise() -> None:
    """Coins 0 to 3 of 5000 positions, and the draft noise that chose the tokens. False alarm: below 1e-6."""
    coins = torch.tensor([[coin(3, position, index) for position in range(5000)] for index in range(4)])
    drafts = torch.stack([uniform(3, position, torch.arange(4), DRAFT) for position in range(5000)]).T
    correlations = torch.corrcoef(torch.cat([coins.to(torch.float64), drafts])) - torch.eye(8)
    assert correlations.abs().max() < 5.5 / 5000**0.5
    assert stats.kstest(coins.flatten().numpy(), "uniform").pvalue > 1e-7


# --------------------------------------------------------------------------------------------------
# Choosing


def test_choose_follows_p_at_every_position_and_independently() -> None:
    """20,000 positions, six tokens: chi-square against p, and against p x p for pairs of neighbours.

    False alarm: 2e-6.
    """
    p = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.01], dtype=torch.float64)
    chosen = torch.tensor([choose(p.log(), None, 2026, position) for position in range(20_000)])
    counts = torch.bincount(chosen, minlength=6).numpy()
    assert stats.chisquare(counts, (p * len(chosen)).numpy()).pvalue > 1e-6
    pairs = torch.bincount(chosen[::2] * 6 + chosen[1::2], minlength=36).numpy()
    wanted = (torch.outer(p, p).flatten() * (len(chosen) / 2)).numpy()
    rare = wanted < 5  # pooled, as a chi-square test needs
    assert stats.chisquare([*pairs[~rare], pairs[rare].sum()], [*wanted[~rare], wanted[rare].sum()]).pvalue > 1e-6


def test_choose_follows_p_over_seeds() -> None:
    """The same position under 5,000 seeds, with token ids that are not indices. False alarm: 1e-6."""
    p = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    ids = torch.tensor([40_000, 7, 151_000])
    chosen = [choose(p.log(), ids, seed, 17) for seed in range(5_000)]
    counts = [chosen.count(token) for token in ids.tolist()]
    assert sum(counts) == 5_000
    assert stats.chisquare(counts, (p * 5_000).numpy()).pvalue > 1e-6


def exact_choice(log_probs: Tensor, ids: Sequence[int] | Tensor, seed: int, position: int) -> int:
    tokens = torch.as_tensor(ids)
    return int(tokens[(log_probs.to(torch.float64) + gumbel(seed, position, tokens)).argmax()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_choose_is_the_exact_argmax_over_a_large_vocabulary(dtype: torch.dtype) -> None:
    """50,000 tokens, flat and peaked: what `gumbel` decides over all, although only near ones use it."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.arange(50_000)
    for position in range(30):
        scores = torch.randn(50_000, generator=generator, dtype=dtype) * (0.0, 1.0, 8.0)[position % 3]
        log_probs = scores.log_softmax(0)
        wanted = exact_choice(log_probs, ids, 9, position)
        assert choose(log_probs, None, 9, position) == wanted
        assert choose(log_probs, ids, 9, position) == wanted
        assert choose(log_probs + 3.5, None, 9, position) == exact_choice(log_probs + 3.5, ids, 9, position)


def test_choose_decides_near_ties_by_the_exact_scores() -> None:
    """Ten tokens within 1e-3 to 1e-15 of the best, in random places: the choice is still the exact argmax."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.arange(50_000)
    winners = set()
    for position in range(60):
        log_probs = torch.randn(50_000, generator=generator, dtype=torch.float64).log_softmax(0)
        g = gumbel(4, position, ids)
        best = (log_probs + g).max()
        rivals = torch.randperm(50_000, generator=generator)[:10]
        gaps = torch.randn(10, generator=generator, dtype=torch.float64) * 10.0 ** -(3 + position % 13)
        log_probs[rivals] = best + gaps - g[rivals]
        wanted = exact_choice(log_probs, ids, 4, position)
        assert choose(log_probs, None, 4, position) == wanted
        winners.add(rivals.tolist().index(wanted) if wanted in rivals else -1)
    assert len(winners) > 5, "the ties were decided in many ways"


def test_perturbed_scores_are_the_scores_that_choose_compares() -> None:
    """log p + g for every token, to the last digits, in the noise of any stream; drafters rank by them."""
    log_probs = torch.randn(5_000, generator=torch.Generator().manual_seed(3)).log_softmax(0)
    ids = torch.randperm(5_000, generator=torch.Generator().manual_seed(4)) * 30
    for stream in (COUPLED, DRAFT):
        found = perturbed(log_probs, ids, 6, 7, stream)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, log_probs + gumbel(6, 7, ids, stream), rtol=0, atol=1e-9)
    assert torch.equal(perturbed(log_probs, None, 6, 7), perturbed(log_probs, torch.arange(5_000), 6, 7))
    assert choose(log_probs, ids, 6, 7) == int(ids[perturbed(log_probs, ids, 6, 7).argmax()])


def test_choose_takes_the_smaller_index_when_scores_are_equal() -> None:
    """With log p = -g every score is 0, exactly: index 0 wins, the first of `ids`, whatever its id."""
    ids = torch.arange(1000)
    assert choose(-gumbel(1, 2, ids), None, 1, 2) == 0
    backwards = ids.flip(0)
    assert choose(-gumbel(1, 2, backwards), backwards, 1, 2) == 999


def test_choose_never_takes_an_impossible_token() -> None:
    """log p = -inf loses at every position; a single possible token always wins."""
    log_probs = torch.full((50,), -torch.inf)
    log_probs[31] = -40.0
    assert {choose(log_probs, None, 1, position) for position in range(200)} == {31}
    log_probs[7] = -40.0
    assert {choose(log_probs, None, 1, position) for position in range(200)} == {7, 31}
