"""Read the rotary keys of a `config.json`, in every spelling, into `Rope`.

Contract: the keys are `rope_parameters`, or the older `rope_scaling` with `rope_theta` beside it. Gemma 3 has
one set of parameters for layers with full attention and one for windowed layers. If both spellings are
present they must agree. Each scaling type reads its own keys; `reference.py` decides about the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import ConfigReader
from foredraft.model.reference import ELSEWHERE_IN_ROPE, check_unread
from foredraft.model.reference_keys import ROPE as REFERENCE
from foredraft.model.rope import Rope

# the default rotary bases of Gemma 3's full-attention and windowed layers; all other families have the latter
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
ORIGINAL = "original_max_position_embeddings"
OVERRIDDEN = ("llama3", "yarn")  # types that take ORIGINAL from the whole config, where it has one
LAYERS = {"full_attention", "sliding_attention"}  # kinds of layers with parameters of their own, in Gemma 3
KEEP_TRAINED = "keep the one that the model was trained with"


def read_rope(read: ConfigReader) -> Rope:
    """Return the rotary parameters of a family that rotates all layers alike.

    Raises:
        CheckpointError: A key is missing, has a wrong value, is not supported, or contradicts another.
    """
    sections = [section for key in ("rope_parameters", "rope_scaling") if (section := read.section(key))]
    original = None if read.take(ORIGINAL) is None else read.count(ORIGINAL)
    return _read_all(read, sections, "rope_theta", LOCAL_THETA, original)


def read_ropes(read: ConfigReader) -> tuple[Rope, Rope]:
    """Return Gemma 3's rotary parameters: of layers with full attention, and of windowed layers.

    Raises:
        CheckpointError: As in `read_rope`.
    """
    nested = read.section("rope_parameters")
    full = nested.section("full_attention") if nested else None
    windowed = nested.section("sliding_attention") if nested else None
    truncate = nested.flag("truncate", default=True) if nested else True
    if nested:  # the keys of one set are not read here, so they are misplaced
        read.ignored |= check_unread(nested, frozenset().union(*REFERENCE.values()), ELSEWHERE_IN_ROPE)
    scaling = read.section("rope_scaling")  # applies to layers with full attention only
    if scaling and "rope_type" not in scaling.config and "type" in scaling.config:
        raise scaling.error("type", "spell it rope_type, because transformers ignores type in this family")
    ropes = (
        _read_all(read, [section for section in (full, scaling) if section], "rope_theta", GLOBAL_THETA),
        _read_all(read, [windowed] if windowed else [], "rope_local_base_freq", LOCAL_THETA),
    )
    # transformers reads truncate beside the two sets, not in them
    for section in filter(None, (full, windowed, scaling)):
        if section.take("truncate") not in (None, truncate):
            read.ignored[section.named("truncate")] = section.take("truncate")
    first, second = (replace(rope, truncate=truncate) if rope.kind == "yarn" else rope for rope in ropes)
    return first, second


def _read_all(
    read: ConfigReader,
    sections: list[ConfigReader],
    theta_key: str,
    theta: float,
    original: int | None = None,
) -> Rope:
    """Read every spelling that is present, and check that they agree.

    Args:
        read: The whole config.
        sections: The JSON objects with rotary parameters; none means the default type.
        theta_key: The key of the whole config that holds the base where a section does not.
        theta: The default base.
        original: `original_max_position_embeddings` of the whole config.
    """
    ropes = [
        _read_one(read, section, _theta(read, section, theta_key, theta), original)
        for section in sections or [ConfigReader({})]
    ]
    if ropes[0] != ropes[-1]:
        raise CheckpointError(
            f"config.json: rope_parameters = {shortened(sections[0].config)} and rope_scaling = "
            f"{shortened(sections[1].config)} differ",
            remedy=KEEP_TRAINED,
        )
    return ropes[0]


def _read_one(read: ConfigReader, section: ConfigReader, theta: float, original: int | None) -> Rope:
    kind = section.take("rope_type", section.take("type", "default"))
    if section.take("type") not in (None, kind):
        raise section.error("type", f"rope_type is {shortened(kind)}; keep one of them")
    if not isinstance(kind, str) or kind not in KINDS:
        raise CheckpointError(
            f"{section.where}: rope type {shortened(kind)} is not supported",
            remedy=f"supported are {', '.join(KINDS)}",
        )
    trained = read.count("max_position_embeddings")
    if original is not None and kind in OVERRIDDEN:
        if section.take(ORIGINAL) not in (None, original):
            raise read.error(ORIGINAL, f"{section.where} has {section.take(ORIGINAL)}; {KEEP_TRAINED}")
        section.config = {**section.config, ORIGINAL: original}
    rope = KINDS[kind](section, theta, trained)
    read.ignored |= check_unread(section, REFERENCE[kind] | LAYERS, ELSEWHERE_IN_ROPE)
    return rope


def _theta(read: ConfigReader, section: ConfigReader, key: str, default: float) -> float:
    """Return the rotary base, from the section or else from `key` of the whole config."""
    if "rope_theta" not in section.config:
        return read.number(key, default)
    theta = section.number("rope_theta")
    if read.take(key) not in (None, theta):
        raise read.error(key, f"{section.where} has {theta}; {KEEP_TRAINED}")
    return theta


def _default(section: ConfigReader, theta: float, trained: int) -> Rope:
    return Rope("default", theta)


def _linear(section: ConfigReader, theta: float, trained: int) -> Rope:
    return Rope("linear", theta, factor=section.number("factor"))


def _dynamic(section: ConfigReader, theta: float, trained: int) -> Rope:
    # the base grows from max_position_embeddings on, whatever ORIGINAL says
    return Rope("dynamic", theta, factor=section.number("factor"), original_positions=trained)


def _llama3(section: ConfigReader, theta: float, trained: int) -> Rope:
    rope = Rope(
        "llama3",
        theta,
        factor=section.number("factor"),
        low_frequency=section.number("low_freq_factor"),
        high_frequency=section.number("high_freq_factor"),
        original_positions=section.count(ORIGINAL, trained),
    )
    if rope.low_frequency >= rope.high_frequency:
        raise section.error(
            "low_freq_factor", f"it must be less than high_freq_factor, {rope.high_frequency}"
        )
    return rope


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
    attention = section.optional_number("attention_factor") or _attention_factor(
        factor, mscale, mscale_all_dim
    )
    return Rope(
        "yarn",
        theta,
        factor=factor,
        low_frequency=slow,
        high_frequency=fast,
        original_positions=original,
        attention_factor=attention,
        truncate=section.flag("truncate", default=True),
    )


def _attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return YaRN's factor on cosines and sines where the config has no `attention_factor`."""

    def scaled(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if mscale is None or mscale_all_dim is None:
        return scaled(1.0)
    return scaled(mscale) / scaled(mscale_all_dim)


# scaling type -> function of (its section, theta, max_position_embeddings)
KINDS: dict[str, Callable[[ConfigReader, float, int], Rope]] = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
