"""Quantised weights: weights of few bits, and what they stand for.

A method reads its config keys into a scheme of weight formats; a format reads tensors into `Codes`, whose
`expand` is the definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from foredraft.errors import CheckpointError, Option, shortened
from foredraft.model.config import ConfigReader
from foredraft.model.quantisation.scheme import KEYS, METHOD, Quantisation
from foredraft.model.tensor_names import AS_STORED, Naming

Reader = Callable[[ConfigReader, Naming], Quantisation]


def methods() -> dict[str, tuple[frozenset[str], Reader]]:
    """Return, by quant_method, the keys that change no result, and the reader of the others."""
    # Here, not above: most checkpoints are not quantised.
    from foredraft.model.quantisation import blocks, compressed_tensors, gptq

    return {
        gptq.AUTO_ROUND: (gptq.HARMLESS_OF_AUTO_ROUND, gptq.read_auto_round),
        "awq": (gptq.HARMLESS_IN_AWQ | gptq.HARMLESS_OF_AUTO_ROUND, gptq.read_awq),
        "compressed-tensors": (compressed_tensors.HARMLESS, compressed_tensors.read_compressed_tensors),
        "fp8": (compressed_tensors.HARMLESS_IN_FP8, compressed_tensors.read_fp8),
        METHOD: (frozenset(), blocks.read_gguf),
        "gptq": (gptq.HARMLESS_IN_GPTQ | gptq.HARMLESS_OF_AUTO_ROUND, gptq.read_gptq),
    }


def read_quantisation(read: ConfigReader, naming: Naming = AS_STORED) -> Quantisation | None:
    given = [key for key in KEYS if read.take(key) is not None]
    if not given:
        return None
    key = given[0]
    if any(read.take(other) != read.take(key) for other in given[1:]):
        raise read.error(given[1], f"{key} differs; keep the one of the weights")
    if not isinstance(read.take(key), dict):
        raise read.error(key, "it must be a JSON object or null")
    section, where = read.take(key), f"{read.where}, {key}"
    config = ConfigReader(section, where)
    method = config.take("quant_method", "compressed-tensors" if key == KEYS[1] else None)
    if method == "bitsandbytes":
        original = "give the 16-bit model that it was made from, with "
        if config.take("load_in_8bit") or config.take("_load_in_8bit"):
            raise CheckpointError(
                f"{where}: quant_method 'bitsandbytes' with load_in_8bit picks outlier columns over all rows"
                " of a pass, so a token would depend on its neighbours",
                remedy=(original, Option("weights", "int8")),
            )
        kind = shortened(config.take("bnb_4bit_quant_type", "fp4"))
        problem = f"{where}: quant_method 'bitsandbytes' with bnb_4bit_quant_type {kind} is not supported"
        raise CheckpointError(problem, remedy=(original, Option("weights", "int4")))
    if method is None and {"group_size", "bits"} <= section.keys():
        raise CheckpointError(
            f"{where}: MLX packs weights in a format of its own, which is not supported",
            remedy=("give the 16-bit model that it was made from, with ", Option("weights", "int4")),
        )
    known = methods()
    if not isinstance(method, str) or method not in known:
        raise config.error("quant_method", f"supported are {', '.join(known)}")
    harmless, reader = known[method]
    config = ConfigReader(section, where, harmless | {"quant_method"})
    found = reader(config, naming)
    config.reject_unknown_keys()
    return found if method == METHOD else replace(found, naming=naming)
