"""Distributions of response lengths: named ones, files of lengths, and the lengths of a run.

    lognormal:median=2000,sigma=1,max=24576        pareto:shape=1.15,mean=55,max=900
    bimodal:short=2000,sigma=0.5,share=0.1,long=24576        uniform:min=10,max=500        fixed:length=800

A length is the length that the model would generate without a budget; ``max`` truncates it, as ``batch.max_response_tokens``
does. A ``mean`` is the mean of the truncated lengths.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_rl.errors import UserError

Draw = Callable[[np.random.Generator, int], np.ndarray]

_QUANTILES = (np.arange(20_000) + 0.5) / 20_000
_NO_MAX = float(2**31)


@dataclass(frozen=True)
class LengthDistribution:
    text: str
    """Description of the distribution for tables."""
    draw: Draw
    """Draws int64 lengths of at least 1: (generator, number of lengths) -> lengths."""


def empirical(values: np.ndarray, text: str) -> LengthDistribution:
    """Return the empirical distribution, in which all observed lengths are equally likely."""
    seen = np.asarray(values)
    if seen.ndim != 1 or not len(seen) or not np.all(np.isfinite(seen)) or seen.min() < 1:
        raise UserError(f"--lengths {text}: expected at least one length, each of them 1 or more, got {_shown(seen)}")
    tokens = np.ceil(np.minimum(seen, _NO_MAX)).astype(np.int64)
    return LengthDistribution(f"{text} ({len(tokens):,} lengths, mean {tokens.mean():.0f})", lambda rng, n: rng.choice(tokens, n))


def read_lengths(path: Path) -> LengthDistribution:
    """Read a file with one length per line, or the array of a .npy file. Raises UserError if it has no valid lengths."""
    try:
        if path.suffix == ".npy":
            values = np.load(path, allow_pickle=False)
        else:
            values = np.array([float(line) for line in path.read_text().split()])
    except (OSError, ValueError, UnicodeDecodeError) as error:
        raise UserError(f"--lengths {path}: expected one length per line, or a .npy array of them: {error}") from error
    if values.dtype.kind not in "iuf":
        raise UserError(f"--lengths {path}: expected numbers, got an array of {values.dtype}")
    return empirical(values, path.name)


def named_lengths(words: str) -> LengthDistribution:
    """Parse ``name:key=value,...``. Raises UserError for an unknown name or an invalid value."""
    name, _, rest = words.partition(":")
    if name not in _KINDS:
        raise UserError(
            f"--lengths {words}: {name!r} is neither a distribution nor a file; expected one of "
            f"{', '.join(f'{kind}:{keys}' for kind, (keys, _) in _KINDS.items())}, or a file with one length per line"
        )
    keys, make = _KINDS[name]
    options = _options(words, rest)
    known = {key.strip("[]").split("=")[0] for part in keys.split(",") for key in part.split("|")}
    if unknown := sorted(set(options) - known):
        raise UserError(f"--lengths {words}: {name} does not take {', '.join(unknown)}; it takes {keys}")
    try:
        quantile = make(options)
    except (KeyError, ValueError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"--lengths {words}: {what}; {name} takes {keys}") from None
    return LengthDistribution(words, lambda rng, n: np.maximum(np.ceil(quantile(rng.random(n))), 1).astype(np.int64))


_Quantile = Callable[[np.ndarray], np.ndarray]


def _fixed(options: Mapping[str, float]) -> _Quantile:
    length = options["length"]
    return lambda u: np.full(len(u), length)


def _uniform(options: Mapping[str, float]) -> _Quantile:
    low, high = options.get("min", 1.0), options["max"]
    _expect(low <= high, f"min={low:g} is above max={high:g}")
    return lambda u: low - 1 + u * (high - low + 1)


def _normal(options: Mapping[str, float]) -> _Quantile:
    mean, std, high = options["mean"], options["std"], options.get("max", _NO_MAX)
    _expect(mean < high, f"mean={mean:g} is not below max={high:g}")
    return lambda u: np.minimum(mean + std * _normal_quantile(u), high)


def _lognormal(options: Mapping[str, float]) -> _Quantile:
    sigma, high = options["sigma"], options.get("max", _NO_MAX)

    def with_median(median: float) -> _Quantile:
        return lambda u: np.minimum(median * np.exp(sigma * _normal_quantile(u)), high)

    if "median" in options:
        _expect("mean" not in options, "median and mean exclude each other")
        return with_median(options["median"])
    return with_median(_scale_for(options["mean"], high, with_median))


def _pareto(options: Mapping[str, float]) -> _Quantile:
    shape, high = options["shape"], options.get("max", _NO_MAX)

    def with_min(low: float) -> _Quantile:
        return lambda u: np.minimum(low * (1 - u) ** (-1 / shape), high)

    if "min" in options:
        _expect("mean" not in options, "min and mean exclude each other")
        _expect(options["min"] <= high, f"min={options['min']:g} is above max={high:g}")
        return with_min(options["min"])
    _expect(shape > 1 or high < _NO_MAX, f"with shape={shape:g} the mean is infinite without a max")
    return with_min(_scale_for(options["mean"], high, with_min))


def _bimodal(options: Mapping[str, float]) -> _Quantile:
    share, long = options["share"], options["long"]
    _expect(share <= 1, f"share={share:g} is more than 1")
    _expect(options["short"] <= long, f"short={options['short']:g} is above long={long:g}")
    short = _lognormal({"median": options["short"], "sigma": options.get("sigma", 0.5), "max": long})

    def quantile(u: np.ndarray) -> np.ndarray:
        # The lower part of u, rescaled to 0..1, draws the short responses.
        return np.where(u < 1 - share, short(np.clip(u / max(1 - share, 1e-12), 1e-12, 1 - 1e-12)), long)

    return quantile


_KINDS: dict[str, tuple[str, Callable[[Mapping[str, float]], _Quantile]]] = {
    "fixed": ("length", _fixed),
    "uniform": ("[min],max", _uniform),
    "normal": ("mean,std,[max]", _normal),
    "lognormal": ("median|mean,sigma,[max]", _lognormal),
    "pareto": ("shape,mean|min,[max]", _pareto),
    "bimodal": ("short,[sigma],share,long", _bimodal),
}
"""Maps a name to its options and the function that makes its quantile function."""


def _options(words: str, rest: str) -> dict[str, float]:
    options = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not equals or not 0 < number < float("inf"):
            raise UserError(f"--lengths {words}: expected key=value with a number above 0, got {part!r}")
        options[key.strip()] = number
    return options


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _scale_for(mean: float, high: float, family: Callable[[float], _Quantile]) -> float:
    """Find the scale at which the family's mean, truncated at ``high``, is ``mean``, by bisection on the logarithm."""
    _expect(mean < high, f"mean={mean:g} is not below max={high:g}")
    low_log, high_log = np.log(mean) - 30.0, np.log(min(high, _NO_MAX))
    for _ in range(60):
        middle = (low_log + high_log) / 2
        too_small = float(np.mean(np.maximum(np.ceil(family(float(np.exp(middle)))(_QUANTILES)), 1))) < mean
        low_log, high_log = (middle, high_log) if too_small else (low_log, middle)
    return float(np.exp((low_log + high_log) / 2))


def _normal_quantile(u: np.ndarray) -> np.ndarray:
    """Return the inverse of the standard normal distribution between -6 and 6, interpolated on a grid."""
    return np.interp(np.asarray(u), _GRID_U, _GRID_Z)


def _shown(values: np.ndarray) -> str:
    return f"{values.ravel()[:5].tolist()}{'...' if values.size > 5 else ''}"


_GRID_Z = np.linspace(-6, 6, 6_001)
_GRID_U = np.array([(1 + math.erf(z / math.sqrt(2))) / 2 for z in _GRID_Z.tolist()])
