"""Options as llama.cpp, vLLM and `transformers` spell them; an error then says what they are here.

docs/guides/coming-from.md translates whole commands. The other names are those of
https://github.com/ggml-org/llama.cpp/blob/master/tools/completion/README.md and
https://docs.vllm.ai/en/latest/cli/serve.html.
"""

from __future__ import annotations

from collections.abc import Collection

from foredraft.arguments import spelled_elsewhere
from foredraft.cli.sections import flag_of
from foredraft.decode.params import SamplingParams
from foredraft.kinds.load_options import LoadOptions

__all__ = ["name_here"]

# Other name -> what it is here. Names of options of the library stand with their declarations.
NAMES = {
    (name if name.startswith("-") else flag_of(name)): flag_of(here)
    for record in (LoadOptions, SamplingParams)
    for name, here in spelled_elsewhere(record).items()
} | {
    "--guided-choice": "--choice",
    "-sys": "--system",
    "--system-prompt": "--system",
    "-cnv": "--chat",
    "--conversation": "--chat",
    "-ngl": "--device cuda",
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
