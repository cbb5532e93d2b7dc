"""Read the JSON objects of a checkpoint strictly: no key is overlooked.

`ConfigReader` records the keys that its caller reads. `reject_unknown_keys` refuses the others by name and
value; for a `config.json`, `unsupported.check_unread` decides. Of `generation_config.json`, a key that is
also an option of a request becomes that option's default; any other key that `transformers` reads changes
nothing here, or is named in a warning; an absent key sets nothing. `python -m recipes.reference_keys` makes
`reference_keys.json`, the keys that transformers reads, and says what reading means.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError, shortened
from foredraft.files import NO_FILE, TEXT, is_no_file

logger = logging.getLogger(__name__)

_TABLE = json.loads(files("foredraft.model").joinpath("reference_keys.json").read_text(encoding="utf-8"))
SHARED_KEYS = frozenset(_TABLE["shared"])  # of every supported model type
# Model type -> its keys, and type of rotary parameters -> theirs.
CONFIG_KEYS = {name: SHARED_KEYS | frozenset(keys) for name, keys in _TABLE["config"].items()}
KEYS_BY_ROPE = {kind: frozenset(keys) for kind, keys in _TABLE["rope"].items()}
GENERATION_KEYS = frozenset(_TABLE["generation"])  # of generation_config.json

DOWNLOAD_AGAIN = "download it again"  # the remedy for a broken or incomplete file
MAX_FLOAT = sys.float_info.max
MAX_DEPTH = 50  # objects and lists within each other in a JSON file; no file of a checkpoint has ten
MAX_FILE_NAME = 255  # bytes, on all common file systems
NO_DEFAULT = object()  # of a key that must be there


def broken(problem: str) -> CheckpointError:
    return CheckpointError(problem, remedy=DOWNLOAD_AGAIN)


def mismatch(problem: str) -> CheckpointError:
    return CheckpointError(problem, remedy="take both files from one checkpoint")


def read_json(path: Path) -> dict[str, Any]:
    try:
        if is_no_file(path):
            raise OSError(NO_FILE)
        content = parse_json(path.read_text(encoding=TEXT))
    except (OSError, ValueError) as error:
        raise broken(f"{path} is not readable JSON ({error})") from error
    if not isinstance(content, dict):
        raise broken(f"{path} does not hold a JSON object")
    return content


# Sizes beyond those of any model that a machine can hold: refused before anything is made of that size.
MOST = {
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "vocab_size": 2**24,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
}
MAX_WIDTH = 2**19  # of all query heads together
MAX_KEY_WIDTH = 2**15  # of all key heads together


def parse_json(text: str) -> Any:
    too_deep = ValueError(f"lists and objects are nested more than {MAX_DEPTH} deep")
    try:
        value = json.loads(text)
    except RecursionError:
        raise too_deep from None
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        nested = [each for each in level if isinstance(each, list | dict)]
        level = [item for each in nested for item in (each.values() if isinstance(each, dict) else each)]
        if not nested:
            return value
    raise too_deep


def is_file_name(text: str) -> bool:
    return Path(text).name == text and len(text.encode("utf-8", "replace")) <= MAX_FILE_NAME


class ConfigReader:
    """Reads the keys of a JSON object, checks their values, and records which keys were read.

    A default replaces a key that is absent, not a key that is null, which most keys refuse.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        where: str = "config.json",
        harmless: frozenset[str] = frozenset(),
        spelled: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config  # the JSON object
        self.where = where  # its name in error messages
        self.harmless = harmless  # keys that need not be read
        self.spelled = spelled or {}  # keys that may be spelled otherwise -> that spelling
        self.seen: set[str] = set()  # keys that were read
        self.ignored: dict[str, object] = {}  # keys that were found to change nothing, with their values

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, unchecked, and record the key as read."""
        own = self.key(key)
        self.seen |= {key, own}
        if own != key and key in self.config and self.config[key] != self.config[own]:
            problem = f"{self.where}: {key} is {shortened(self.config[key])}"
            raise CheckpointError(problem, remedy=f"{own} is {shortened(self.config[own])}; keep one of them")
        return self.config.get(own, default)

    def key(self, key: str) -> str:
        own = self.spelled.get(key, key)
        return own if own in self.config else key

    def section(self, key: str) -> ConfigReader | None:
        """Return a reader of the JSON object under a key; None if it is absent, null or empty."""
        value = self.take(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, "it must be a JSON object or null")
        return ConfigReader(value, f"{self.where}, {key}") if value else None

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_FLOAT:
            raise self.error(key, "it must be a finite number above 0")
        return float(value)

    def count(
        self, key: str, default: int | None = None, *, if_null: int | None = None, allow_zero: bool = False
    ) -> int:
        """Return a whole number above 0."""
        value = self.take(key, default)
        if value is None and if_null is not None:
            return if_null
        if allow_zero and value == 0 and not isinstance(value, bool):
            return 0
        value, most = self.number(key, default), MOST.get(key, 2**31 - 1)
        if value != int(value) or value > most:
            raise self.error(key, f"it must be a whole number, at most {most:,}")
        return int(value)

    def optional_number(
        self, key: str, default: float | None = None, *, zero_is_null: bool = False
    ) -> float | None:
        """Return a finite number above 0; None for null and, with `zero_is_null`, for 0."""
        value = self.take(key, default)
        return None if value is None or (zero_is_null and value == 0) else self.number(key, default)

    def flag(self, key: str, default: bool = False, *, if_null: bool | None = None) -> bool:
        """Return true or false; `if_null` is the value of a null key, and None refuses null."""
        value = self.take(key, default)
        if value is None and if_null is not None:
            return if_null
        if not isinstance(value, bool):
            raise self.error(key, "it must be true or false")
        return value

    def choice(self, key: str, accepted: Sequence[Any], default: Any = NO_DEFAULT) -> Any:
        """Return a value that equals an accepted one, in type too; without a default, it must be there."""
        value = self.take(key, default)
        if not any(type(value) is type(each) and value == each for each in accepted):
            shown = (each if isinstance(each, str) else json.dumps(each) for each in accepted)
            raise self.error(key, f"supported are {', '.join(shown)}")
        return value

    def error(self, key: str, remedy: str) -> CheckpointError:
        """Return the error of a key with a wrong value; `remedy` says which values are accepted."""
        own = self.key(key)
        found = f"is {shortened(self.config[own])}" if own in self.config else "is missing"
        return CheckpointError(f"{self.where}: {own} {found}", remedy=remedy)

    def unread(self) -> dict[str, Any]:
        """Return the keys that are neither read nor harmless nor null, with their values."""
        known = self.seen | self.harmless
        return {key: value for key, value in self.config.items() if key not in known and value is not None}

    def named(self, key: str) -> str:
        """Return the key with those of the objects around it, as in "rope_scaling.factor"."""
        return ".".join([*self.where.split(", ")[1:], key])

    def reject_unknown_keys(self) -> None:
        for key, value in self.unread().items():
            raise CheckpointError(
                f"{self.where}: {key} = {shortened(value)} is not known, and ignoring it could change the"
                " model's output",
                remedy="use a checkpoint without it, or remove the key if it does not affect the model",
            )


GENERATION = "generation_config.json"
# Keys that are options of a request of the same name: those that greedy decoding reads too, and the others.
ALWAYS = "max_new_tokens min_new_tokens repetition_penalty".split()
SAMPLING = "min_p temperature top_k top_p typical_p".split()
COUNTS = {"max_new_tokens", "min_new_tokens", "top_k"}
# Keys that do not affect the text here: ids, output formats, caches, assistants, limits that requests have.
HARMLESS = frozenset(
    """
    _from_model_config _commit_hash assistant_confidence_threshold assistant_early_exit assistant_lookbehind
    bos_token_id cache_config cache_implementation compile_config continuous_batching_config
    decoder_start_token_id disable_compile do_sample eos_token_id is_assistant max_length
    max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule output_attentions
    output_hidden_states output_logits output_scores pad_token_id prefill_chunk_size
    prompt_lookup_num_tokens return_dict_in_generate stop_strings target_lookbehind transformers_version
    trust_remote_code use_cache
    """.split()
)
# values that switch a feature off, besides null; 0 is also 0.0 and False
NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys("diversity_penalty encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff".split(), (0,)),
    **dict.fromkeys("early_stopping low_memory min_length no_repeat_ngram_size".split(), (0,)),
    **dict.fromkeys("remove_invalid_values renormalize_logits token_healing".split(), (0,)),
    **dict.fromkeys("encoder_repetition_penalty guidance_scale length_penalty num_beam_groups".split(), (1,)),
    **dict.fromkeys("num_beams num_return_sequences top_h".split(), (1,)),
}


def generation_defaults(config: Mapping[str, Any], file: Path, vocab_size: int) -> dict[str, Any]:
    config = {key: value for key, value in config.items() if value is not None}
    unread = []
    for key in sorted(config.keys() - {*ALWAYS, *SAMPLING} - HARMLESS):
        name, value = shortened(key)[1:-1], shortened(config[key])  # a key is any string: without quotes
        if key not in GENERATION_KEYS:
            unread.append(f"{name} = {value}")
        elif config[key] not in NEUTRAL.get(key, ()):
            logger.warning("%s asks for %s = %s, which is not supported; it is left out", file, name, value)
    if unread:
        logger.info("%s: ignored, because transformers does not read it: %s", file, ", ".join(unread))
    for key in ("bos_token_id", "eos_token_id"):
        for id in config[key] if isinstance(config.get(key), list) else [config.get(key)]:
            if isinstance(id, int) and id >= vocab_size:
                message = "%s asks for %s = %s, but the model's vocabulary ends at %d; it is left out"
                logger.warning(message, file, key, shortened(id), vocab_size - 1)
    greedy = config.get("do_sample") is False
    options: dict[str, Any] = (
        {"temperature": 0.0} if greedy else {key: config[key] for key in SAMPLING if key in config}
    )
    options |= {key: config[key] for key in ALWAYS if key in config}
    if "stop_strings" in config:
        options["stop"] = config["stop_strings"]
    for key in COUNTS & options.keys():  # some checkpoints write whole numbers as floats
        if isinstance(value := options[key], float) and value.is_integer():
            options[key] = int(value)
    return options
