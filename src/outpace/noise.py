"""(seed, position, token id) -> noise. Knows nothing about models, trees or devices.

Coupled verification needs one Gumbel vector per position that is the same on every device, in every batch
and for every drafter. It is computed from counters, not drawn from a generator: a 64-bit hash (the
splitmix64 finaliser, Steele et al. 2014, applied twice) of (seed, stream, position, token id), mapped to a
uniform number in (0, 1) with 52 bits and then to a Gumbel number by a logarithm made of additions,
multiplications and divisions only. Those are correctly rounded by IEEE 754 everywhere; a library's `log` is not.

`choose` is where plain sampling happens: argmax of log p + g (the Gumbel-max trick, Maddison et al. 2014).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

COUPLED, DRAFT, COIN = 0, 1, 2  # streams: never share noise between drafting, ratio tests and coupled choices

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_LN2 = 0.6931471805599453
# The rough scores of `choose` are off by less than this; only scores nearer to the best are recomputed exactly.
_SCREEN_MARGIN = 1e-4


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """x >> bits as if x were unsigned (torch shifts int64 arithmetically)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _mix_int(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * (_MIX_1 & _MASK)) & _MASK
    x = ((x ^ (x >> 27)) * (_MIX_2 & _MASK)) & _MASK
    return x ^ (x >> 31)


def _key(seed: int, position: int, stream: int) -> int:
    """The signed 64-bit key of one noise vector. Seeds count modulo 2^64."""
    key = _mix_int(_mix_int(seed + (_GOLDEN & _MASK) * (stream + 1)) + (_GOLDEN & _MASK) * (position + 1))
    return key - (1 << 64) if key >= 1 << 63 else key


def _bits(seed: int, position: int, tokens: Tensor, stream: int) -> Tensor:
    """52 random bits per token id. tokens: any shape, integers. Returns int64 in [0, 2^52)."""
    tokens = tokens.to(torch.int64)
    return _shift_right(_mix(_mix(tokens * _GOLDEN + _key(seed, position, stream)) + _GOLDEN), 12)


def _log(x: Tensor) -> Tensor:
    """Natural logarithm of positive float64 numbers from basic arithmetic only; error below 5e-16 relative.

    x = m 2^e with m in [sqrt(1/2), sqrt(2)); log m = 2 artanh(s) with s = (m - 1) / (m + 1), |s| < 0.172,
    summed as a power series in s^2 up to s^23.
    """
    mantissa, exponent = torch.frexp(x)
    low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(low, mantissa * 2, mantissa)
    exponent = exponent.to(torch.float64) - low.to(torch.float64)
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    series = torch.full_like(s, 1 / 23)
    for k in range(21, 0, -2):
        series = series * square + 1 / k
    return 2 * s * series + exponent * _LN2


def uniform(seed: int, position: int, tokens: Tensor, stream: int = COUPLED) -> Tensor:
    """Uniform numbers strictly between 0 and 1, float64 and exact, shaped like `tokens` (integer ids)."""
    return (_bits(seed, position, tokens, stream).to(torch.float64) + 0.5) * 2.0**-52


def coin(seed: int, position: int, index: int) -> float:
    """The index-th uniform number of a position for ratio tests, independent of all Gumbel noise."""
    return float(uniform(seed, position, torch.tensor(index), COIN))


def gumbel(seed: int, position: int, tokens: Tensor, stream: int = COUPLED) -> Tensor:
    """Standard Gumbel numbers, float64, shaped like `tokens`; a pure function of its integer arguments.

    tokens: any shape, integers  token ids; position: absolute index of the token in the sequence.
    """
    u = uniform(seed, position, tokens, stream)
    # -log u loses all digits where u is near 1, the large noise that decides: use the distance to 1 there.
    near_one = 1.0 - u
    tail = near_one * (1 + near_one * (0.5 + near_one * (1 / 3 + near_one * (0.25 + near_one * 0.2))))
    exponential = torch.where(near_one < 1e-3, tail, -_log(u))
    return -_log(exponential)


def rough(seed: int, position: int, tokens: Sequence[int], stream: int = COUPLED) -> list[float]:
    """`gumbel` for a few ids, quickly, with the library's logarithm: good enough to guess with."""
    golden = _GOLDEN & _MASK
    key = _key(seed, position, stream) & _MASK
    bits = (_mix_int(_mix_int(token * golden + key) + golden) >> 12 for token in tokens)
    return [-math.log(-math.log((x + 0.5) * 2.0**-52)) for x in bits]


def perturbed(log_probs: Tensor, ids: Tensor | None, seed: int, position: int, stream: int = COUPLED) -> Tensor:
    """[n] float64: log p + g, where the logarithm is the library's, so the last digits may differ between devices.

    log_probs: [n] float, need not be normalised  ids: [n] int64 token ids, or None when index = id.
    """
    tokens = torch.arange(log_probs.shape[0], device=log_probs.device) if ids is None else ids
    return log_probs - torch.log(-torch.log(uniform(seed, position, tokens, stream)))


def choose(log_probs: Tensor, ids: Tensor | None, seed: int, position: int) -> int:
    """The token that plain sampling emits: argmax over x of log p(x) + g(x), ties to the smaller index.

    log_probs: [n] float, need not be normalised  ids: [n] int64 token ids, or None when index = id.

    Scores are screened with the library's logarithm; whenever a second one comes near the best, the near ones
    are decided by `gumbel`, so the choice depends on log_probs and the integers alone.
    """
    rough = perturbed(log_probs, ids, seed, position)
    near = torch.nonzero(rough >= rough.max() - _SCREEN_MARGIN).flatten()
    if near.shape[0] > 1:
        tokens = near if ids is None else ids[near]
        exact = log_probs[near].to(torch.float64) + gumbel(seed, position, tokens)
        near = near[exact.argmax()].unsqueeze(0)
    return int(near[0] if ids is None else ids[near[0]])
