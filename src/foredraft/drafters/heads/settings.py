"""The settings of a head that the doctor found to be better than its config's.

They lie beside the head, in `foredraft-head.json` (for a GGUF file with its name in front), or in the
user's cache folder. Loading honours them and says so. They change how well a head drafts, never what is
generated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from foredraft import user_cache
from foredraft.drafters.heads.record import Record
from foredraft.drafters.heads.tensors import HeadFiles
from foredraft.errors import CheckpointError, shortened
from foredraft.files import replacing
from foredraft.model.config import read_json
from foredraft.model.spec import ModelSpec

SETTINGS = "foredraft-head.json"
KIND = "heads"  # of the user's cache
SUFFIXES = (".json", ".safetensors", ".gguf")  # of the files of a head
REMEDY = f"run `foredraft doctor` again, or remove {SETTINGS}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """What differs from a head's own files; None leaves a field as it is."""

    tap_shift: int | None = None  # by how many layers the auxiliary layers move
    rope_theta: float | None = None  # the rotary base
    window: int | None = None  # positions of the head's own attention, the last ones
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    final_norm: bool | None = None
    states_first: bool | None = None
    folded_norms: bool | None = None
    from_anchor: bool | None = None
    causal: bool | None = None
    own_head: bool | None = None
    own_embedding: bool | None = None

    @property
    def given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def described(self) -> str:
        """What differs, for people; "" for nothing."""
        return ", ".join(f"{name} = {json.dumps(value)}" for name, value in self.given.items())

    def applied(self, record: Record, target: ModelSpec) -> Record:
        assert record.aux_layers is not None
        spec = record.spec
        if self.rope_theta is not None:
            spec = replace(spec, rope=replace(spec.rope, theta=self.rope_theta))
        aux_layers = tuple(layer + (self.tap_shift or 0) for layer in record.aux_layers)
        if not all(0 <= layer <= target.layers for layer in aux_layers):
            shift = f"tap_shift = {self.tap_shift} moves {list(record.aux_layers)}"
            raise CheckpointError(f"{SETTINGS}: {shift} out of the target", remedy=REMEDY)
        flags = {name: value for name, value in self.given.items() if name in FLAGS}
        fits = spec.hidden_size == target.hidden_size
        for name, value in flags.items():
            own = name.startswith("own_")
            gone = own and value != getattr(record, name) and (value or not fits)
            if gone or (not own and name not in record.misread):
                problem = f"{SETTINGS}: {name} = {json.dumps(value)} is not possible with this head"
                raise CheckpointError(problem, remedy=REMEDY)
        changed = replace(record, spec=spec, aux_layers=aux_layers, **flags)
        return changed if self.window is None else changed.windowed(self.window)


FLAGS = tuple(each.name for each in fields(HeadSettings) if each.type == "bool | None")


Files = TypeVar("Files", bound=HeadFiles[Any])


def with_settings(files: Files, target: ModelSpec) -> tuple[Files, HeadSettings]:
    """Return the files of a head for its target, with the settings that the doctor wrote, and these."""
    settings = read_settings(files.folder)
    record = settings.applied(files.record.for_target(target, str(files.folder)), target)
    return replace(files, record=record), settings


def described_head(files: HeadFiles[Record], settings: HeadSettings) -> str:
    """Return what a head is, for people."""
    record, size = files.record, files.record.draft_vocab_size
    aux_layers = ", ".join(map(str, record.aux_layers or ()))
    reduced = "" if size == record.spec.vocab_size else f", draft vocabulary {size}"
    changed = settings.described
    told = f"; `foredraft doctor` set {changed}" if changed else ""
    blocks = "" if record.drafts is None else f", blocks of {record.drafts}"
    about = f"the head {files.folder} over layers {aux_layers}{blocks}"
    return f"{about}, {files.parameters / 1e6:.1f} M weights{reduced}{told}"


def settings_file(head: Path) -> Path:
    """Return the file of the settings of a head, in its folder or beside its GGUF file."""
    return head / SETTINGS if head.is_dir() else head.with_name(f"{head.name}.{SETTINGS}")


def read_settings(head: Path) -> HeadSettings:
    """Return the settings of a head; where there are none, they change nothing."""
    file = settings_file(head)
    if file.is_file():
        found = read_json(file)
    else:
        kept = user_cache.read(KIND, _key(head))
        found, file = kept if isinstance(kept, dict) else {}, user_cache.keyed_path(KIND, _key(head)) or file
    for name, value in found.items():
        sound = {
            **dict.fromkeys(FLAGS, type(value) is bool),
            "tap_shift": type(value) is int,
            "rope_theta": type(value) in (int, float) and value > 0,
            "window": type(value) is int and value > 0,
        }
        if not sound.get(name, False):
            problem = f"{file}: {name} = {shortened(value)} is no setting of a head"
            raise CheckpointError(problem, remedy=REMEDY)
    return HeadSettings(**found)


def _key(head: Path) -> list[Any]:
    """Return the key of a head in the user's cache: its place, and the files there as they are now."""
    files = sorted(head.iterdir()) if head.is_dir() else [head]
    of_head = [file for file in files if file.suffix in SUFFIXES and file.name != SETTINGS]
    stats = [(file.name, file.stat()) for file in of_head]
    return [str(head.resolve()), [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]]


def write_settings(head: Path, settings: HeadSettings | Mapping[str, Any]) -> Path:
    """Write the settings of a head and return their file; those that change nothing remove it."""
    file = settings_file(head)
    given = settings.given if isinstance(settings, HeadSettings) else dict(settings)
    if user_cache.read(KIND, key := _key(head)):
        user_cache.write(KIND, key, {})
    if not given:
        file.unlink(missing_ok=True)
        return file
    try:
        with replacing(file) as new:
            new.write_text(json.dumps(given, indent=1) + "\n")
    except OSError:
        user_cache.write(KIND, key, given)
        kept = user_cache.keyed_path(KIND, key)
        if kept is None or user_cache.read(KIND, key) != given:
            raise
        return kept
    return file
