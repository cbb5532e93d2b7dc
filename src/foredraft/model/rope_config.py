"""The rotary keys of a `config.json`, in every spelling, as `Rope`s.

Contract: `rope_parameters`, or the older `rope_scaling` with `rope_theta` beside it; in families whose
windowed layers rotate otherwise, one set for each kind of layer. Spellings that are both there must say the
same. Each kind of scaling knows its own keys; any other is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from foredraft.errors import CheckpointError
from foredraft.model.config import ConfigReader, shortened
from foredraft.model.rope import Rope

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0  # Gemma 3's
ORIGINAL = "original_max_position_embeddings"


def read_rope(read: ConfigReader) -> Rope:
    """The rotary parameters of a family that rotates all layers alike."""
    parts = [part for key in ("rope_parameters", "rope_scaling") if (part := read.part(key))]
    return _agreeing(read, parts, "rope_theta", LOCAL_THETA)


def read_ropes(read: ConfigReader) -> tuple[Rope, Rope]:
    """Those of layers that see everything, and of layers with a window (Gemma 3)."""
    nested = read.part("rope_parameters")
    everything = nested.part("full_attention") if nested else None
    windowed = nested.part("sliding_attention") if nested else None
    if nested:
        nested.refuse_rest()
    scaling = read.part("rope_scaling")  # of layers that see everything alone
    if scaling and "rope_type" not in scaling.config and "type" in scaling.config:
        raise scaling.wrong("type", "spell it rope_type: transformers ignores type here in this family")
    ropes = (
        _agreeing(read, [part for part in (everything, scaling) if part], "rope_theta", GLOBAL_THETA),
        _agreeing(read, [windowed] if windowed else [], "rope_local_base_freq", LOCAL_THETA),
    )
    for part in filter(None, (everything, windowed, scaling)):
        if part.take("truncate") is False:
            raise part.wrong("truncate", "transformers does not honour it in this family; leave it out")
    return ropes


def _agreeing(read: ConfigReader, parts: list[ConfigReader], theta_key: str, theta: float) -> Rope:
    """What the spellings say; what one leaves out is taken from beside it."""
    ropes = [_rope_of(read, part, theta_key, theta) for part in parts or [ConfigReader({})]]
    if ropes[0] != ropes[-1]:
        raise CheckpointError(
            f"config.json: rope_parameters = {shortened(parts[0].config)} and rope_scaling = "
            f"{shortened(parts[1].config)} differ; keep the one that the model was trained with"
        )
    return ropes[0]


def _rope_of(read: ConfigReader, part: ConfigReader, theta_key: str, default_theta: float) -> Rope:
    kind = part.take("rope_type", part.take("type", "default"))
    if part.take("type") not in (None, kind):
        raise part.wrong("type", f"rope_type is {shortened(kind)}; keep one of them")
    theta = _theta(read, part, theta_key, default_theta)
    if not isinstance(kind, str) or kind not in KINDS:
        raise CheckpointError(
            f"{part.where}: rope type {shortened(kind)} is not supported; supported are {', '.join(KINDS)}"
        )
    rope = KINDS[kind](part, theta, read.count("max_position_embeddings"))
    part.refuse_rest()
    return rope


def _theta(read: ConfigReader, part: ConfigReader, key: str, default: float) -> float:
    if "rope_theta" not in part.config:
        return read.number(key, default)
    theta = part.number("rope_theta")
    if read.take(key) not in (None, theta):
        raise read.wrong(key, f"{part.where} says {theta}; keep the one that the model was trained with")
    return theta


def _default(part: ConfigReader, theta: float, trained: int) -> Rope:
    return Rope("default", theta)


def _linear(part: ConfigReader, theta: float, trained: int) -> Rope:
    part.seen.add(ORIGINAL)  # transformers does not read it here
    return Rope("linear", theta, factor=part.number("factor"))


def _dynamic(part: ConfigReader, theta: float, trained: int) -> Rope:
    part.seen.add(ORIGINAL)  # nor here: it grows the base from max_position_embeddings on
    return Rope("dynamic", theta, factor=part.number("factor"), original_positions=trained)


def _llama3(part: ConfigReader, theta: float, trained: int) -> Rope:
    rope = Rope(
        "llama3",
        theta,
        factor=part.number("factor"),
        low_frequency=part.number("low_freq_factor"),
        high_frequency=part.number("high_freq_factor"),
        original_positions=part.count(ORIGINAL, trained),
    )
    if rope.low_frequency >= rope.high_frequency:
        raise part.wrong("low_freq_factor", f"it must be below high_freq_factor, {rope.high_frequency}")
    return rope


def _yarn(part: ConfigReader, theta: float, trained: int) -> Rope:
    original = part.count(ORIGINAL, trained)
    slow, fast = part.optional("beta_slow", zero=True) or 1.0, part.optional("beta_fast", zero=True) or 32.0
    if slow >= fast:
        given = "beta_slow" if "beta_slow" in part.config else "beta_fast"
        raise part.wrong(given, f"beta_slow, {slow}, must be below beta_fast, {fast}")
    if theta <= 1:
        raise part.wrong("rope_theta", f"yarn needs one above 1, and it is {theta}")
    # null, not absence, asks for the ratio of the lengths
    unsaid = "factor" in part.config and part.take("factor") is None
    factor = trained / original if unsaid else part.number("factor")
    scales = part.optional("mscale", zero=True), part.optional("mscale_all_dim", zero=True)
    attention = part.optional("attention_factor") or _attention_factor(factor, scales)
    if "attention_factor" not in part.config and (more := part.optional("attn_factor")) not in (None, 1):
        raise part.wrong(
            "attn_factor",
            "transformers does not read it: write attention_factor, which is"
            f" {more * attention:.6g} with it and {attention:.6g} without, and leave it out",
        )
    return Rope(
        "yarn",
        theta,
        factor=factor,
        low_frequency=slow,
        high_frequency=fast,
        original_positions=original,
        attention_factor=attention,
        truncate=part.flag("truncate", default=True),
    )


def _attention_factor(factor: float, scales: tuple[float | None, float | None]) -> float:
    """By how much yarn sharpens attention, where the config does not say."""

    def of(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    over, under = scales
    return of(1.0) if over is None or under is None else of(over) / of(under)


# kind -> (its keys, theta, max_position_embeddings) -> parameters
KINDS: dict[str, Callable[[ConfigReader, float, int], Rope]] = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
