"""Read the files of an EAGLE-1 or EAGLE-2 head in SafeAILab's spelling.

Contract: only this module knows these config keys and tensor names. The config is that of a Llama of one
layer, which tells no head from a small model: the tensors `fc.*` and `layers.*` do. They say, too, whether
`fc` has a bias, and whether the head has an embedding of its own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from foredraft.drafters.heads.eagle3_files import (
    CONFIG,
    EMBEDDING,
    HEAD,
    OF_THE_HEAD,
    Eagle3Files,
    checked,
    is_eagle3,
    record_of,
)
from foredraft.drafters.heads.weight_files import has_weights, refuse_pickles
from foredraft.errors import CheckpointError
from foredraft.model.checkpoint import weight_headers
from foredraft.model.config import ConfigReader, read_json
from foredraft.model.safetensors_file import SINGLE, SafetensorsFile
from foredraft.model.tensor_names import AS_STORED

__all__ = ["is_eagle", "read_eagle"]

FIRST = "layers.0.self_attn.q_proj.weight"
FOREIGN = frozenset({"norm.weight", "hidden_norm.weight"})  # of other heads with an `fc`
TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # of a whole model


def is_eagle(place: Path) -> bool:
    """Return whether a folder holds an EAGLE-1 or EAGLE-2 head, as its config and its tensors' names say."""
    if is_eagle3(place) or not (place / CONFIG).is_file():
        return False
    try:
        if (place / SINGLE).is_file():
            with SafetensorsFile(place / SINGLE) as opened:
                names = opened.tensors
                return {"fc.weight", FIRST} <= {*names} and not {"norm.weight", "hidden_norm.weight"} & {
                    *names
                }
        one_layer = read_json(place / CONFIG).get("num_hidden_layers") == 1
    except CheckpointError:
        return False
    whole = any((place / name).is_file() for name in TOKENIZERS)
    return one_layer and not whole and not has_weights(place)


def read_eagle(place: Path) -> Eagle3Files:
    """Return the head in a folder, as its config and the headers of its weights say.

    Raises:
        CheckpointError: The files are broken, contradict each other, or need what is not supported.
    """
    config = read_json(place / CONFIG)
    refuse_pickles(place)
    headers = weight_headers(place, AS_STORED)
    read = ConfigReader(config)
    record = record_of(read, config, OF_THE_HEAD | {"bias", "qkv_bias"}, None)
    spec = record.spec
    if read.flag("qkv_bias", if_null=False):
        spec = replace(spec, qkv_bias=True)
    if read.take("bias") is not None and read.flag("bias") != ("fc.bias" in headers):
        raise CheckpointError(
            f"{place}: config.json has bias = {str(config['bias']).lower()}, but fc.bias is"
            f" {'there' if 'fc.bias' in headers else 'missing'}",
            remedy="take both files from one head",
        )
    record = replace(
        record, spec=spec, layer="layers.0", spelling="SafeAILab", target_size=spec.hidden_size, pair_fc=True,
        final_norm=True, own_embedding=EMBEDDING in headers, own_head=HEAD in headers,
    )  # fmt: skip
    return Eagle3Files(place, record, checked(place, record, 1, headers))
