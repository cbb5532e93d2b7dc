"""Change a document of the user's cache, so that the change is not seen by its digest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foredraft import user_cache


def replace_document(file: Path, document: Any) -> None:
    content = json.loads(file.read_text())
    content |= {"document": document, "digest": user_cache._digest_of(document)}
    file.write_text(json.dumps(content) + "\n")
