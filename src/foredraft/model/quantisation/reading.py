"""Read how a checkpoint is quantised, as strictly as every other key of a config.json.

Contract: a method, a key or a value that is not understood is a `CheckpointError` that names it. So is a
method whose result for a token depends on the other tokens of a pass: speculation could not be lossless
there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from foredraft.errors import CheckpointError, Option, shortened
from foredraft.model.config import ConfigReader
from foredraft.model.quantisation import auto_round, awq, compressed_tensors, fp8, gguf, gptq
from foredraft.model.quantisation.scheme import Quantisation
from foredraft.model.tensor_names import AS_STORED, Naming

__all__ = ["KEYS", "read_quantisation"]

KEYS = ("quantization_config", "compression_config")  # the second is compressed-tensors' old name
# quant_method -> the keys that change no result, and the reader of the others
METHODS: dict[str, tuple[frozenset[str], Callable[[ConfigReader, Naming], Quantisation]]] = {
    auto_round.METHOD: (auto_round.HARMLESS, auto_round.read_auto_round),
    "awq": (awq.HARMLESS | auto_round.HARMLESS, awq.read_awq),
    "compressed-tensors": (compressed_tensors.HARMLESS, compressed_tensors.read_compressed_tensors),
    "fp8": (fp8.HARMLESS, fp8.read_fp8),
    gguf.METHOD: (frozenset(), gguf.read_gguf),
    "gptq": (gptq.HARMLESS | auto_round.HARMLESS, gptq.read_gptq),
}


def read_quantisation(read: ConfigReader, naming: Naming = AS_STORED) -> Quantisation | None:
    """Return the scheme of a config.json; None if its weights are not quantised.

    Args:
        read: The config.
        naming: How a checkpoint of safetensors files names modules.

    Raises:
        CheckpointError: The scheme is not supported; the message names method, key and value.
    """
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
        raise _bitsandbytes(config)
    if not isinstance(method, str) or method not in METHODS:
        raise config.error("quant_method", f"supported are {', '.join(METHODS)}")
    harmless, reader = METHODS[method]
    config = ConfigReader(section, where, harmless | {"quant_method"})
    found = reader(config, naming)
    config.reject_unknown_keys()
    return found if method == gguf.METHOD else replace(found, naming=naming)


def _bitsandbytes(read: ConfigReader) -> CheckpointError:
    """Return the error of a checkpoint of bitsandbytes."""
    original = "give the 16-bit model that it was made from, with "
    if read.take("load_in_8bit") or read.take("_load_in_8bit"):
        return CheckpointError(
            f"{read.where}: quant_method 'bitsandbytes' with load_in_8bit picks outlier columns over all rows"
            " of a pass, so a token would depend on its neighbours",
            remedy=(original, Option("weights", "int8")),
        )
    kind = shortened(read.take("bnb_4bit_quant_type", "fp4"))
    return CheckpointError(
        f"{read.where}: quant_method 'bitsandbytes' with bnb_4bit_quant_type {kind} is not supported",
        remedy=(original, Option("weights", "int4")),
    )
