"""llm, the command: a model of `extra-openai-models.yaml`, prompted and asked for JSON from the shell."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import URL, WANT

COMMAND = [str(Path(sys.executable).parent / "llm")]
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "extra-openai-models.yaml").write_text(
        f"- model_id: here\n  model_name: demo\n  api_base: {URL}/v1\n  supports_schema: true\n  supports_tools: true\n"
    )
    environment = os.environ | {"LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}

    def llm(*arguments: str) -> str:
        ran = subprocess.run(
            [*COMMAND, *arguments], env=environment, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.removesuffix("\n")

    options = ["-m", "here", "-o", "temperature", "0", "-o", "max_tokens", "24"]
    assert llm("def add(a, b):", *options) == WANT["text"]
    assert llm("def add(a, b):", *options, "--no-stream") == WANT["text"]
    # Nothing in this schema is without end: a small model that may add names or digits runs out of tokens.
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2, 3]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    made = llm("Choose.", "-m", "here", "-o", "max_tokens", "100", "--schema", json.dumps(schema))
    assert json.loads(made)["n"] in {1, 2, 3}
