"""Rotary position embeddings (RoPE, arXiv:2104.09864): parameters, scaling types and the rotation table.

Contract: the rotation of a position depends on that position alone, never on the pass, the batch or the
history. Scaling types:

    default   no scaling
    linear    positions are divided by a factor (arXiv:2306.15595)
    dynamic   the base grows past the trained length (dynamic NTK scaling, arXiv:2309.00071); a position has
              the base of a text that ends with it, as in decoding token by token
    yarn      frequencies are interpolated by channel (YaRN, arXiv:2309.00071)
    llama3    frequencies are interpolated by wavelength (arXiv:2407.21783)
    proportional  a share of the channels rotates, with the frequencies that they have among all (Gemma 4)
    longrope  each frequency is divided by a factor of its own: a short one, or a long one in models that are
              loaded for texts past the trained length (LongRoPE, arXiv:2402.13753)

A head may be rotated in part: its first channels are, and the others stay as they are. What is rotated may
grow with its position (`Rope.growth`).

The keys of a `config.json` are `rope_parameters`, or the older `rope_scaling` with `rope_theta` beside it; if
both are present they must agree. Some families have one set of parameters for layers with full attention and
one for windowed layers. Each scaling type reads its own keys; `unsupported.check_unread` decides about the
others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import KEYS_BY_ROPE, ConfigReader
from foredraft.model.unsupported import ELSEWHERE_IN_ROPE, check_unread

MAX_POSITIONS = 2**31 - 1  # the largest length that 32-bit positions can hold


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary parameters of one scaling type; a type ignores the parameters that it does not define."""

    kind: str  # the scaling type, as in the table above
    theta: float  # the base of the frequencies
    factor: float = 1.0  # the factor by which low frequencies, or positions, are divided
    # below this many turns in `original_positions`, a frequency is divided by `factor`
    low_frequency: float = 1.0
    high_frequency: float = 1.0  # above this many turns in `original_positions`, a frequency is kept
    original_positions: int = 0  # the trained length before scaling, in positions
    attention_factor: float = 1.0  # the factor on cosines and sines
    truncate: bool = True  # whether YaRN rounds the bounds of its interpolation to whole channels
    share: float = 1.0  # the share of a head's channels that is rotated
    factors: tuple[float, ...] = ()  # of longrope, the divisor of each frequency
    # the same for models that are loaded for texts past `original_positions`; `at_length` chooses
    long_factors: tuple[float, ...] = ()
    growth: float = 0.0  # what is rotated is multiplied by 1 + growth * ln(1 + floor(position / period))
    period: int = 1  # the positions of one step of this growth
    turning: float = 1.0  # of proportional, the share of the frequencies that are not 0

    def rotated(self, head_dim: int) -> int:
        """Return R, the channels of a head that are rotated."""
        return int(head_dim * self.share)

    def at_length(self, positions: int) -> Rope:
        if not self.long_factors:
            return self
        chosen = self.long_factors if positions > self.original_positions else self.factors
        return replace(self, factors=chosen, long_factors=())


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the angle per position of each pair of channels, [R/2] in float32; unscaled for "dynamic"."""
    inverse = _inverse_frequencies(rope.theta, rope.rotated(head_dim))
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _by_wavelength(rope, inverse)
    if rope.kind == "yarn":
        return _by_channel(rope, inverse)
    if rope.kind == "proportional":
        rotates = torch.arange(len(inverse)) < int(rope.turning * head_dim // 2)
        return torch.where(rotates, inverse / rope.factor, 0.0)
    if rope.kind == "longrope":
        return inverse / torch.tensor(rope.long_factors or rope.factors, dtype=torch.float32)
    return inverse


def rope_table(rope: Rope, head_dim: int, positions: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the rotation of every position, to be used as x * cos + roll(x, R/2) * sin."""
    position = torch.arange(positions, dtype=torch.float32)[:, None]
    if rope.kind == "dynamic":
        rotated = rope.rotated(head_dim)
        angles = position * _inverse_frequencies(_dynamic_theta(rope, rotated, positions), rotated)
    else:
        angles = position * frequencies(rope, head_dim)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor  # [P, R/2]
    table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
    if rope.growth:
        table *= _grown(rope, positions)[:, None, None]
    return table.to(device=device, dtype=dtype)  # [P, 2, R]


def _grown(rope: Rope, positions: int) -> Tensor:
    return 1 + rope.growth * torch.log(1 + torch.arange(positions) // rope.period)


def _inverse_frequencies(theta: float | Tensor, rotated: int) -> Tensor:
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated  # [R/2]
    return 1.0 / theta**exponents


def _dynamic_theta(rope: Rope, rotated: int, positions: int) -> Tensor:
    """Return the base of each position, [P, 1]: the base of a text that ends with it."""
    length = torch.arange(1, positions + 1).clamp(min=rope.original_positions)[:, None]
    stretch = rope.factor * length / rope.original_positions - (rope.factor - 1)
    return rope.theta * stretch ** (rotated / (rotated - 2))


def _by_wavelength(rope: Rope, inverse: Tensor) -> Tensor:
    """Divide low frequencies by the factor; interpolate between the bounds by wavelength."""
    wavelength = 2 * math.pi / inverse
    longest = rope.original_positions / rope.low_frequency
    shortest = rope.original_positions / rope.high_frequency
    width = rope.high_frequency - rope.low_frequency
    blend = (rope.original_positions / wavelength - rope.low_frequency) / width
    blended = (1 - blend) * inverse / rope.factor + blend * inverse
    stretched = torch.where(wavelength > longest, inverse / rope.factor, inverse)
    between = (wavelength <= longest) & (wavelength >= shortest)
    return torch.where(between, blended, stretched)


def _by_channel(rope: Rope, inverse: Tensor) -> Tensor:
    """Divide low frequencies by the factor; interpolate between the bounds by channel."""
    pairs = len(inverse)
    rotated = 2 * pairs

    def channel_pair(turns: float) -> float:
        length = rope.original_positions / (turns * 2 * math.pi)
        return rotated * math.log(length) / (2 * math.log(rope.theta))

    first, last = channel_pair(rope.high_frequency), channel_pair(rope.low_frequency)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    width = last - first or 0.001  # transformers widens an empty ramp by 0.001 too
    stretched = ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0, 1)
    return inverse / rope.factor * stretched + inverse * (1 - stretched)


# the default rotary bases of Gemma 3's full-attention and windowed layers; all other families have the latter
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
ORIGINAL = "original_max_position_embeddings"
OVERRIDDEN = ("llama3", "longrope", "yarn")  # types that take ORIGINAL from the whole config, if it has one
LAYERS = "full_attention", "sliding_attention"  # kinds of layers with parameters of their own, in Gemma 3
ROPE_KEYS = ("rope_parameters", "rope_scaling")
GROWTH = "llama_4_scaling_beta"
PARTIAL = "partial_rotary_factor"
SAME_KINDS = {kind: kind for kind in ("default", "dynamic", "linear", "llama3", "longrope", "yarn")}
ALL_KINDS = {**SAME_KINDS, "proportional": "proportional"}
KEEP_TRAINED = "keep the one that the model was trained with"


def read_rope(
    read: ConfigReader,
    theta: float = LOCAL_THETA,
    *,
    head_dim: int | None = None,
    share: float = 1.0,
    original: int | None = None,
    kinds: Mapping[str, str] = SAME_KINDS,
    theta_key: str = "rope_theta",
    share_key: str = PARTIAL,
) -> Rope:
    sections = [section for key in ROPE_KEYS if (section := read.section(key))]
    original = original if read.take(ORIGINAL) is None else read.count(ORIGINAL)
    share = 1.0 if head_dim is None else _share(read, sections, head_dim, share, share_key)
    return replace(_read_all(read, sections, theta_key, theta, original, kinds), share=share)


def read_growing_rope(read: ConfigReader) -> tuple[Rope, Rope | None]:
    """Return the rotary parameters of a family whose queries grow with their position, and of queries."""
    sections = [section for key in ROPE_KEYS if (section := read.section(key))]
    growths = [section.optional_number(GROWTH, zero_is_null=True) for section in sections]
    periods = {*zip(growths, (section.count(ORIGINAL) for section in sections), strict=True)}
    for section in sections:
        section.seen.add("max_position_embeddings")  # the length of the whole config counts
        if GROWTH not in section.config or len(periods) > 1:
            raise section.error(GROWTH, KEEP_TRAINED)
    original = None if read.take(ORIGINAL) is None else read.count(ORIGINAL)
    rope = _read_all(read, sections, "rope_theta", LOCAL_THETA, original)
    if not periods or (period := periods.pop())[0] is None:
        return rope, None
    return rope, replace(rope, growth=period[0], period=period[1])


def read_ropes(
    read: ConfigReader,
    theta: float = GLOBAL_THETA,
    window_theta: float = LOCAL_THETA,
    *,
    window_key: str | None = "rope_local_base_freq",
) -> tuple[Rope, Rope]:
    nested = read.section("rope_parameters")
    full, windowed = (nested.section(kind) if nested else None for kind in LAYERS)
    truncate = nested.flag("truncate", default=True) if nested else True
    if nested:
        _check_misplaced(read, nested)
    scaling = read.section("rope_scaling")  # applies to layers with full attention only
    full_ones, all_ones = [*filter(None, (full, scaling))], [*filter(None, (full, windowed, scaling))]
    if scaling and "rope_type" not in scaling.config and "type" in scaling.config:
        raise scaling.error("type", "spell it rope_type, because transformers ignores type in this family")
    ropes = (
        _read_all(read, full_ones, "rope_theta", theta),
        _read_all(read, [windowed] if windowed else [], window_key, window_theta),
    )
    # transformers reads truncate beside the two sets, not in them
    for section in all_ones:
        if section.take("truncate") not in (None, truncate):
            read.ignored[section.named("truncate")] = section.take("truncate")
    first, second = (replace(rope, truncate=truncate) if rope.kind == "yarn" else rope for rope in ropes)
    return first, second


def read_full_ropes(read: ConfigReader) -> tuple[Rope, Rope]:
    """Return Gemma 4's rotary parameters, of full and of windowed layers; both or none are given."""
    nested = read.section("rope_parameters")
    if nested is None:
        return Rope("proportional", GLOBAL_THETA, turning=0.25), Rope("default", LOCAL_THETA)
    ropes = []
    for kind in LAYERS:
        if (section := nested.section(kind)) is None:
            raise nested.error(kind, "it must hold the rotary parameters of these layers")
        ropes.append(_read_one(read, section, section.number("rope_theta"), None, ALL_KINDS))
    _check_misplaced(read, nested)
    return ropes[0], ropes[1]


def _check_misplaced(read: ConfigReader, nested: ConfigReader) -> None:
    """Check what stands beside the sets of two kinds of layers: keys of a set are not read there."""
    read.ignored |= check_unread(nested, frozenset().union(*KEYS_BY_ROPE.values()), ELSEWHERE_IN_ROPE)


def _read_all(
    read: ConfigReader,
    sections: list[ConfigReader],
    theta_key: str | None,
    theta: float,
    original: int | None = None,
    kinds: Mapping[str, str] = SAME_KINDS,
) -> Rope:
    sections = sections or [ConfigReader({})]
    ropes = [
        _read_one(read, each, _theta(read, each, theta_key, theta), original, kinds) for each in sections
    ]
    if ropes[0] != ropes[-1]:
        one, other = (shortened(section.config) for section in sections)
        problem = f"config.json: rope_parameters = {one} and rope_scaling = {other} differ"
        raise CheckpointError(problem, remedy=KEEP_TRAINED)
    return ropes[0]


def _share(
    read: ConfigReader, sections: list[ConfigReader], head_dim: int, default: float, key: str
) -> float:
    places = [*((section, PARTIAL) for section in sections), (read, key)]
    given = [(each, name) for each, name in places if each.take(name) is not None]
    for (first, name), (second, other) in pairwise(given):
        if first.number(name) != second.number(other):
            raise first.error(name, f"{second.where} has {second.take(other)}; {KEEP_TRAINED}")
    holder, name = given[0] if given else (read, key)
    share = holder.number(name, default)
    rotated = int(head_dim * share)
    if share > 1 or rotated < 2 or rotated % 2:
        raise holder.error(name, f"it must rotate an even number of the {head_dim} channels of a head")
    return share


def _read_one(
    read: ConfigReader,
    section: ConfigReader,
    theta: float,
    original: int | None,
    kinds: Mapping[str, str],
) -> Rope:
    kind = section.take("rope_type", section.take("type", "default"))
    if section.take("type") not in (None, kind):
        raise section.error("type", f"rope_type is {shortened(kind)}; keep one of them")
    if not isinstance(kind, str) or kind not in kinds:
        problem = f"{section.where}: rope type {shortened(kind)} is not supported"
        raise CheckpointError(problem, remedy=f"supported are {', '.join(kinds)}")
    kind = kinds[kind]
    trained = read.count("max_position_embeddings")
    if original is not None and kind in OVERRIDDEN:
        if section.take(ORIGINAL) not in (None, original):
            raise read.error(ORIGINAL, f"{section.where} has {section.take(ORIGINAL)}; {KEEP_TRAINED}")
        section.config = {**section.config, ORIGINAL: original}
    rope = KINDS[kind](section, theta, trained)
    read.ignored |= check_unread(section, KEYS_BY_ROPE[kind] | {*LAYERS}, ELSEWHERE_IN_ROPE)
    return rope


def _theta(read: ConfigReader, section: ConfigReader, key: str | None, default: float) -> float:
    if key is None:
        return section.number("rope_theta", default)
    if "rope_theta" not in section.config:
        return read.number(key, default)
    theta = section.number("rope_theta")
    if read.take(key) not in (None, theta):
        raise read.error(key, f"{section.where} has {theta}; {KEEP_TRAINED}")
    return theta


def _llama3(section: ConfigReader, theta: float, trained: int) -> Rope:
    factor, low, high = (section.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    rope = Rope("llama3", theta, factor, low, high, section.count(ORIGINAL, trained))
    if rope.low_frequency >= rope.high_frequency:
        remedy = f"it must be less than high_freq_factor, {rope.high_frequency}"
        raise section.error("low_freq_factor", remedy)
    return rope


def _proportional(section: ConfigReader, theta: float, trained: int) -> Rope:
    turning = section.number(PARTIAL, 1.0)
    if turning > 1:
        raise section.error(PARTIAL, "it must be 1 at most")
    return Rope("proportional", theta, factor=section.number("factor", 1.0), turning=turning)


def _longrope(section: ConfigReader, theta: float, trained: int) -> Rope:
    original = section.count(ORIGINAL, trained)
    if original < 2:
        raise section.error(ORIGINAL, "longrope needs 2 positions or more")
    factor = section.optional_number("factor") or trained / original
    attention = section.optional_number("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = (_factors(section, key) for key in ("short_factor", "long_factor"))
    if len(short) != len(long):
        raise section.error("long_factor", f"it must have {len(short)} numbers, as short_factor has")
    rope = Rope("longrope", theta, original_positions=original, attention_factor=attention)
    return replace(rope, factors=short, long_factors=long)


def _factors(section: ConfigReader, key: str) -> tuple[float, ...]:
    listed = section.take(key)
    if not isinstance(listed, list) or not listed:
        raise section.error(key, "it must be a list of numbers")
    numbers = ConfigReader({str(at): value for at, value in enumerate(listed)}, f"{section.where}, {key}")
    return tuple(numbers.number(at) for at in numbers.config)


def _yarn(section: ConfigReader, theta: float, trained: int) -> Rope:
    original = section.count(ORIGINAL, trained)
    slow = section.optional_number("beta_slow", zero_is_null=True) or 1.0
    fast = section.optional_number("beta_fast", zero_is_null=True) or 32.0
    if slow >= fast:
        given = "beta_slow" if "beta_slow" in section.config else "beta_fast"
        raise section.error(given, f"beta_slow, {slow}, must be less than beta_fast, {fast}")
    if theta <= 1:
        raise section.error("rope_theta", f"yarn needs a base above 1, not {theta}")
    # a null factor, unlike an absent one, stands for the ratio of the lengths
    by_lengths = "factor" in section.config and section.take("factor") is None
    factor = trained / original if by_lengths else section.number("factor")
    mscale = section.optional_number("mscale", zero_is_null=True)
    mscale_all_dim = section.optional_number("mscale_all_dim", zero_is_null=True)
    attention = section.optional_number("attention_factor")
    attention = attention or _attention_factor(factor, mscale, mscale_all_dim)
    truncate = section.flag("truncate", default=True)
    return Rope("yarn", theta, factor, slow, fast, original, attention, truncate)


def _attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return YaRN's factor on cosines and sines where the config has no `attention_factor`."""

    def scaled(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if mscale is None or mscale_all_dim is None:
        return scaled(1.0)
    return scaled(mscale) / scaled(mscale_all_dim)


# scaling type -> function of (its section, theta, max_position_embeddings)
KINDS: dict[str, Callable[[ConfigReader, float, int], Rope]] = {
    "default": lambda section, theta, trained: Rope("default", theta),
    # the base grows from max_position_embeddings on, whatever ORIGINAL says
    "dynamic": lambda section, theta, trained: Rope(
        "dynamic", theta, section.number("factor"), original_positions=trained
    ),
    "linear": lambda section, theta, trained: Rope("linear", theta, section.number("factor")),
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
    "yarn": _yarn,
}
