"""Planted defects of the families after Llama; the comparison with transformers must catch each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foredraft.model import attention, decoder, rope, rope_config, row_orders, spec, weights
from foredraft.model.decoder import Decoder
from foredraft.model.families import smollm
from foredraft.model.layers import RMSNorm
from foredraft.model.rope import Rope
from foredraft.model.spec import ModelSpec
from tests.parity.mutant_checks import (
    Function,
    check,
    configured,
    decoding_logits,
    prompt_logits,
    reloaded_logits,
)
from tests.support.planting import Spoiler, defect, replaced

TABLE, FAMILY = rope.rope_table, spec._family


def in_family(spoiler: Spoiler) -> Spoiler:
    """Spoil the function that reads a family's config."""

    def with_family(family_of: Function) -> Function:
        def spoilt(config: Any) -> Any:
            name, family = family_of(config)
            return name, replace(family, fields=spoiler(family.fields))

        return spoilt

    return with_family


def with_field(**changed: Any) -> Spoiler:
    """Read fields of the spec otherwise."""
    return in_family(lambda sound: lambda read: {**sound(read), **changed})


def long_for_short(sound: Function) -> Function:
    return lambda own, positions: sound(own, own.original_positions + 1)


def short_for_long(sound: Function) -> Function:
    return lambda own, positions: sound(own, own.original_positions)


def switched_in_the_middle(sound: Function) -> Function:
    """Rotate positions up to the trained length by the short factors, and the others by the long ones."""

    def spoilt(own: Rope, head_dim: int, positions: int, *rest: Any) -> Tensor:
        table: Tensor = sound(own, head_dim, positions, *rest)
        if own.kind != "longrope":
            return table
        short = replace(own, factors=tuple(1.0 + at / 8 for at in range(len(own.factors))))
        first = own.original_positions
        return torch.cat([sound(short, head_dim, first, *rest), table[first:]])

    return spoilt


def every_layer_rotated(sound: Function) -> Function:
    return lambda read: sound(read)[:0]


def one_layer_early(sound: Function) -> Function:
    return lambda read: tuple(max(0, layer - 1) for layer in sound(read))


def logits_multiplied(head: Function) -> Function:
    """Multiply logits by what divides them."""

    def spoilt(own: Decoder, *rest: Any) -> Tensor:
        with replaced(own, "spec", replace(own.spec, logit_scale=1 / (own.spec.logit_scale or 1))):
            logits: Tensor = head(own, *rest)
        return logits

    return spoilt


def without_residual_scale(sound: Function) -> Function:
    return lambda spec, *rest: sound(replace(spec, residual_scale=None), *rest)


def residual_scaled_too(sound: Function) -> Function:
    """Multiply the states, too."""
    return lambda spec, x, *rest: sound(spec, x * spec.residual_scale, *rest)


def grown_a_position_early(sound: Function) -> Function:
    def spoilt(own: Rope, positions: int) -> Tensor:
        return torch.cat([sound(own, positions + 1)[1:]])

    return spoilt


def grown_within_a_period(sound: Function) -> Function:
    """Grow at every position, not only with each period."""

    def spoilt(own: Rope, positions: int) -> Tensor:
        return 1 + own.growth * torch.log(1 + torch.arange(positions) / own.period)

    return spoilt


def keys_grown_too(sound: Function) -> Function:
    return lambda read: (lambda found: (found[1] or found[0], found[1]))(sound(read))


def split_at_other_rows(sound: Function) -> Function:
    """Take the first rows of keys for queries, by one head."""

    def spoilt(spec: ModelSpec) -> Tensor:
        rows = torch.arange((spec.heads + 2 * spec.kv_heads) * spec.head_dim)
        return rows.roll(spec.head_dim)

    return spoilt


def up_before_gate(sound: Function) -> Function:
    """Take the second half of the fused weight for the gate."""

    def spoilt(builder: Any, names: dict[str, int], *rest: Any) -> Any:
        [name] = names if len(names) == 1 else [""]
        if not name.endswith("gate_up_proj"):
            return sound(builder, names, *rest)
        order = torch.arange(names[name]).roll(names[name] // 2)
        return sound(builder, names, *rest[:1], False, order)

    return spoilt


def whole_head_rotated(sound: Function) -> Function:
    return lambda own, head_dim: head_dim


def norm_without_offset(norm: Function) -> Function:
    def spoilt(builder: Any, name: str, size: int | None = None) -> RMSNorm:
        made: RMSNorm = norm(builder, name, size)
        return replace(made, weight=made.weight - 1.0)

    return spoilt


MUTANTS = [
    defect("long factors for short ones", Rope.at_length, long_for_short, check(reloaded_logits, "phi3-longrope-short")),
    defect("short factors for long ones", Rope.at_length, short_for_long, check(reloaded_logits, "phi3-longrope-long")),
    defect("factors switched in the middle", TABLE, switched_in_the_middle, check(decoding_logits, "phi3-longrope-long")),
    defect(
        "longrope's attention factor left out",
        TABLE,
        lambda sound: lambda own, *rest: sound(replace(own, attention_factor=1.0), *rest),
        check(decoding_logits, "phi3-longrope-factor"),
    ),
    defect("the whole head rotated", Rope.rotated, whole_head_rotated, check(decoding_logits, "phi3-partial")),
    defect("fused weight split at other rows", row_orders.qkv_order, split_at_other_rows, check(reloaded_logits, "phi3")),
    defect("up projection taken for the gate", weights._Builder.linear, up_before_gate, check(reloaded_logits, "phi3")),
    defect("a layer rotated that is not", smollm.read_unrotated, every_layer_rotated, check(reloaded_logits, "smollm3")),
    defect("another layer not rotated", smollm.read_unrotated, one_layer_early, check(reloaded_logits, "smollm3-listed")),
    defect("logits multiplied where they are divided", Decoder.head, logits_multiplied, check(decoding_logits, "granite")),
    defect("factor on what is added left out", decoder._added, without_residual_scale, check(decoding_logits, "granite")),
    defect("factor on the states, too", decoder._added, residual_scaled_too, check(prompt_logits, "granite")),
    defect(
        "scores scaled by the size of a head",
        attention.masked_attention,
        lambda sound: lambda spec, *rest: sound(replace(spec, attention_scale=0.25), *rest),
        check(decoding_logits, "granite"),
    ),
    defect("embeddings not scaled", FAMILY, with_field(embedding_scale=None), check(reloaded_logits, "granite")),
    defect("queries grow a position early", rope._grown, grown_a_position_early, check(decoding_logits, "ministral3")),
    defect("queries grow within a period", rope._grown, grown_within_a_period, check(decoding_logits, "ministral3")),
    defect("keys grow, too", rope_config.read_growing_rope, keys_grown_too, check(reloaded_logits, "ministral3")),
    defect("norms without their offset", weights._Builder.norm, norm_without_offset, check(reloaded_logits, "gemma")),
    defect(
        "gelu taken for SiLU",
        FAMILY,
        in_family(configured(hidden_act="silu")),
        check(reloaded_logits, "gemma-gelu"),
    ),
    defect(
        "share of the head in the section ignored",
        FAMILY,
        in_family(configured(rope_parameters=None)),
        check(reloaded_logits, "phi3-partial"),
    ),
]  # fmt: skip
