from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from foredraft.kernels.compilation import KIND, library
from foredraft.user_cache import cache_folder
from tests.cli.conftest import short_measuring
from tests.support.checkpoints import save_checkpoint, save_pair
from tests.support.gguf_files import write_gguf
from tests.support.loras import save_lora

__all__ = ["short_measuring"]  # a fixture

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the commands a cache of their own, which holds their plans, for instance, and the compiled kernels."""
    folder = tmp_path_factory.mktemp("cache")
    kept = cache_folder(KIND)
    if library() is not None and kept is not None and kept.is_dir():  # else each process would compile them
        shutil.copytree(kept, folder / KIND)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOREDRAFT_CACHE", str(folder))
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the models and prompts of the pages: ./big has a twin in GGUF and a LoRA."""
    folder = save_pair(tmp_path_factory.mktemp("pages"))
    save_checkpoint(folder / "other", tokenizer=True, seed=3, eos_token_id=None, vocab_size=320)
    (folder / "big" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    write_gguf(folder / "big", folder / "big.gguf", "Q8_0")
    save_lora(folder / "big", folder / "lora")
    (folder / "prompt.txt").write_text("def accept(draft, p, q):\n", encoding="utf-8")
    (folder / "prompts.txt").write_text("def accept\nViktor\nthe target checks all\n", encoding="utf-8")
    texts = "".join(
        f'{{"text": "def accept(draft, {n}): the target checks all of them ahead"}}\n' for n in range(40)
    )
    (folder / "my.jsonl").write_text(texts, encoding="utf-8")
    jsonl = "".join(f'{{"prompt": "def accept(draft, {name}):"}}\n' for name in "pqr")
    (folder / "prompts.jsonl").write_text(jsonl, encoding="utf-8")
    return folder
