"""Options as llama.cpp, vLLM and `transformers` spell them; an error then says what they are here.

docs/guides/coming-from.md translates whole commands. The other names are those of
https://github.com/ggml-org/llama.cpp/blob/master/tools/completion/README.md and
https://docs.vllm.ai/en/latest/cli/serve.html.
"""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["name_here"]

# Other name -> what it is here
NAMES = {
    "-m": "--model",
    "-hf": "--model",
    "--hf-repo": "--model",
    "-md": "--draft",
    "--model-draft": "--draft",
    "--assistant-model": "--draft",
    "--draft-max": "--max-draft",
    "-n": "--max-new-tokens",
    "--predict": "--max-new-tokens",
    "--n-predict": "--max-new-tokens",
    "--max-tokens": "--max-new-tokens",
    "-c": "--max-length",
    "--ctx-size": "--max-length",
    "--max-model-len": "--max-length",
    "-np": "--max-batch",
    "--parallel": "--max-batch",
    "--max-num-seqs": "--max-batch",
    "-s": "--seed",
    "--temp": "--temperature",
    "--typical": "--typical-p",
    "--repeat-penalty": "--repetition-penalty",
    "-sys": "--system",
    "--system-prompt": "--system",
    "-cnv": "--chat",
    "--conversation": "--chat",
    "-ngl": "--device cuda",
    "--torch-dtype": "--dtype",
    "-t": "--threads",
}
PROMPT = ("-p", "--prompt")  # for the command that takes one


def name_here(word: str, options: Collection[str], command: str) -> str | None:
    """Return what an unknown option is here; None where it is nothing that the command has.

    Args:
        word: The option as it was given, with its value or without.
        options: The names of the command's options.
        command: The name of the command.

    Examples:
        >>> name_here("--temp=0", ["--temperature"], "generate")
        '--temperature'
        >>> name_here("-p", [], "generate")
        'the argument itself, without an option'
    """
    name, _, _ = word.partition("=")
    if name in PROMPT and command == "generate":
        return "the argument itself, without an option"
    here = NAMES.get(name, "")
    return here if here.partition(" ")[0] in options else None
