"""Prefixes: the folder in which a load keeps beginnings of texts, and what their bits depend on."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from foredraft.decode.engine import Engine
from foredraft.decode.prefix_cache import PrefixCache
from foredraft.decode.prefix_folder import PrefixFolder
from foredraft.drafters.asset import Found
from foredraft.errors import ConfigError
from foredraft.files import check_folder_place, errors_named
from foredraft.kinds.load_options import PREFIX_MIB, LoadOptions
from foredraft.model.cache import KVCache
from foredraft.model.checkpoint import Checkpoint
from foredraft.model.kept_weights import weights_key
from foredraft.model.locate import existing
from foredraft.model.runner import Runner
from foredraft.user_cache import NotPrivateError, state

OPTION = "prefix_folder"


class Prefixes:
    """What the bits in the caches of a load depend on, as it is before the weights are read."""

    def __init__(self, options: LoadOptions, target: Checkpoint, assets: Collection[Found]) -> None:
        self.folder = Path(str(options.prefix_folder)).expanduser()
        check_folder_place(self.folder, OPTION, kept=True)
        self._target = _weights(target)
        given = [existing(place) or place for place in (options.draft, options.adapter) if place is not None]
        files = [file for place in given if isinstance(place, Path) for file in _files(place)]
        models = [_weights(model) for found in assets for model in found.models]
        states = [[str(file), *state(file)] for file in files]
        self._drafting = [models, [str(place) for place in given], options.draft_revision, states]

    def give(self, engine: Engine, runner: Runner) -> None:
        """Let an engine keep texts in the folder."""
        threads = None if runner.by_kernels else torch.get_num_threads()
        target = [self._target, runner.choices, threads]
        identities = {engine.cache: _text(target, engine.cache)}
        for name, drafter in engine.drafters.items():
            for place, cache in enumerate(drafter.caches):
                identities.setdefault(cache, _text([target, self._drafting, name, place], cache))
        try:
            with errors_named(self.folder, OPTION):
                folder = PrefixFolder(self.folder, identities)
        except ConfigError as error:
            if isinstance(error.__cause__, NotPrivateError):
                remedy = "give a folder that only you can write"
                raise ConfigError(
                    "which other users can write", option=OPTION, value=str(self.folder), remedy=remedy
                ) from error
            raise
        engine.prefix_cache = PrefixCache(PREFIX_MIB << 20, folder)


def _weights(model: Checkpoint) -> Any:
    return weights_key(model.source, model.dtype, model.bits)


def _files(place: Path) -> list[Path]:
    return sorted(file for file in (place.iterdir() if place.is_dir() else [place]) if file.is_file())


def _text(identity: list[Any], cache: KVCache) -> str:
    """Return an identity with the layout of a cache, without its rows and positions."""
    planes = [[*plane.shape[:2], plane.shape[3], plane.shape[5]] for plane in cache.planes]
    return json.dumps([identity, str(cache.dtype), cache.blocked, planes], sort_keys=True, default=str)
