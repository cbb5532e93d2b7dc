"""Read the rotary keys of a `config.json`, in every spelling, into `Rope`.

The keys are `rope_parameters`, or the older `rope_scaling` with `rope_theta` beside it; if both are present
they must agree. Some families have one set of parameters for layers with full attention and one for windowed
layers. Each scaling type reads its own keys; `unsupported.check_unread` decides about the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import KEYS_BY_ROPE, ConfigReader
from foredraft.model.rope import Rope
from foredraft.model.unsupported import ELSEWHERE_IN_ROPE, check_unread

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
    sections = rope_sections(read)
    original = original if read.take(ORIGINAL) is None else read.count(ORIGINAL)
    share = 1.0 if head_dim is None else _share(read, sections, head_dim, share, share_key)
    return replace(_read_all(read, sections, theta_key, theta, original, kinds), share=share)


def read_growing_rope(read: ConfigReader) -> tuple[Rope, Rope | None]:
    """Return the rotary parameters of a family whose queries grow with their position, and of queries."""
    sections = rope_sections(read)
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


def rope_sections(read: ConfigReader) -> list[ConfigReader]:
    return [section for key in ROPE_KEYS if (section := read.section(key))]


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
    if scaling and "rope_type" not in scaling.config and "type" in scaling.config:
        raise scaling.error("type", "spell it rope_type, because transformers ignores type in this family")
    ropes = (
        _read_all(read, [*filter(None, (full, scaling))], "rope_theta", theta),
        _read_all(read, [*filter(None, (windowed,))], window_key, window_theta),
    )
    # transformers reads truncate beside the two sets, not in them
    for section in filter(None, (full, windowed, scaling)):
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
    ropes = [
        _read_one(read, section, _theta(read, section, theta_key, theta), original, kinds)
        for section in sections or [ConfigReader({})]
    ]
    if ropes[0] != ropes[-1]:
        raise CheckpointError(
            f"config.json: rope_parameters = {shortened(sections[0].config)} and rope_scaling = "
            f"{shortened(sections[1].config)} differ",
            remedy=KEEP_TRAINED,
        )
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


def _dynamic(section: ConfigReader, theta: float, trained: int) -> Rope:
    # the base grows from max_position_embeddings on, whatever ORIGINAL says
    return Rope("dynamic", theta, section.number("factor"), original_positions=trained)


def _llama3(section: ConfigReader, theta: float, trained: int) -> Rope:
    factor, low, high = (section.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    rope = Rope("llama3", theta, factor, low, high, section.count(ORIGINAL, trained))
    if rope.low_frequency >= rope.high_frequency:
        remedy = f"it must be less than high_freq_factor, {rope.high_frequency}"
        raise section.error("low_freq_factor", remedy)
    return rope


def _proportional(section: ConfigReader, theta: float, trained: int) -> Rope:
    turning = section.number("partial_rotary_factor", 1.0)
    if turning > 1:
        raise section.error("partial_rotary_factor", "it must be 1 at most")
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
    "dynamic": _dynamic,
    "linear": lambda section, theta, trained: Rope("linear", theta, section.number("factor")),
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
    "yarn": _yarn,
}
