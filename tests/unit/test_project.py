"""Promises of the repository as a whole: import floors, quick starts, and a README that is true."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.support.running import ROOT, python, script

README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = re.compile(r"^\| `([\w-]+)` \|", re.MULTILINE)  # of a table, that begin with a name


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[number]


def test_imports_run_downwards_only() -> None:
    python("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", cwd=ROOT)


def test_every_subpackage_has_an_import_layer() -> None:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [layers] = [c["layers"] for c in configuration["contracts"] if c["type"] == "layers"]
    named = {room for layer in layers for room in re.findall(r"foredraft\.(\w+)", layer)}
    rooms = {
        path.stem for path in (ROOT / "src/foredraft").iterdir() if not path.name.startswith(("_", "py."))
    }
    assert rooms <= named, "add the package to the layers of pyproject.toml"


@pytest.mark.parametrize(
    "statement",
    [
        "import foredraft",
        "import foredraft.cli",
        "import foredraft.cli; foredraft.cli.main(['generate', '--help'])",
    ],
)
def test_torch_waits_until_it_is_needed(statement: str) -> None:
    assert loaded_of(["torch", "numpy", "tokenizers", "rich.progress", "jinja2"], statement) == "[]"


def test_the_list_of_commands_loads_none() -> None:
    statement = "import foredraft.cli; foredraft.cli.main(['--help'])"
    assert loaded_of(["foredraft.cli.options", "foredraft.kinds", "rich.markdown"], statement) == "[]"


def loaded_of(modules: list[str], statement: str) -> str:
    found = f"[name for name in {modules} if name in sys.modules]"
    return python("-c", f"import sys; {statement}; print({found})").splitlines()[-1]


def commands(mark: str) -> list[str]:
    """Return the lines of the block that follows a comment in the README."""
    return block("sh", README[: README.index(f"<!-- {mark} -->")].count("```sh\n")).splitlines()


def test_the_readme_commands_are_those_that_the_checks_run() -> None:
    environment, install, job = commands("try it")
    assert environment == "python3 -m venv .venv && . .venv/bin/activate"
    assert (install, job) == ("pip install -c constraints.txt .", "foredraft generate --compare")
    assert commands("tests") == ["pip install -c constraints.txt -e '.[dev]'", "python -m pytest -n auto"]
    script = (ROOT / ".ci/run").read_text()
    [function] = re.findall(r"^block\(\) .*$", script, re.MULTILINE)
    for mark in ("try it", "tests"):
        call = ["bash", "-c", f'{function}\nblock "{mark}"']
        shown = subprocess.run(call, cwd=ROOT, capture_output=True, text=True).stdout
        assert shown.splitlines() == commands(mark)
    for name in ("environment", "install", "job", "tests"):
        assert f'eval "${name}"' in script


def test_constraints_hold_versions_only_and_cover_what_is_declared() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    assert list(pinned) == sorted(pinned)
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+", line) for line in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(r for extra in project["optional-dependencies"].values() for r in extra),
    ]
    names = {re.match(r"[\w-]+", requirement)[0].lower().replace("_", "-") for requirement in wanted}  # type: ignore[index]
    assert names - {"foredraft"} <= set(pinned)


@pytest.mark.parametrize("file", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_the_examples_run(file: str, tmp_path: Path) -> None:
    assert script(ROOT / "examples" / file, cwd=tmp_path)


def test_one_sentence_says_when_auto_makes_a_copy_in_few_bits() -> None:
    """The help, `load` and the pages say it as `info` and the notice do, which read it from its place."""
    import foredraft
    from foredraft.cli.commands import app
    from foredraft.drafters.assets import OFFER

    pages = ["docs/guides/drafters.md", "docs/guides/fewer-bits.md"]
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in pages}
    [option] = [
        argument
        for argument in app["generate"].assemble_argument_collection()
        if "--draft-weights" in argument.names
    ]
    texts |= {"load": foredraft.load.__doc__ or "", "help": str(option.parameter.help)}
    for where, text in texts.items():
        plain = " ".join(re.sub(r"[`\"]", "", text).split())
        assert plain.count(OFFER) == 1 == plain.count(" MiB or more"), where


def test_the_guide_for_users_of_other_programs_has_the_server_and_the_names_that_errors_translate() -> None:
    from foredraft.cli.words import other_names

    lines = (ROOT / "docs/guides/coming-from.md").read_text(encoding="utf-8").splitlines()
    rows = {line.split("|")[1].strip().strip("`"): line for line in lines if line.startswith("| `")}
    for server in ("transformers serve", "vllm serve", "llama-server"):
        assert "[`foredraft serve`](serve.md)" in rows[server]
    for name, here in other_names().items():
        if len(name.lstrip("-")) < 4:  # the short names of llama.cpp
            [row] = [line for line in lines if re.search(rf"`{name}[ `]", line)]
            assert here.removeprefix("the environment variable ") in row, name


def test_the_guide_to_policies_names_all_with_their_numbers() -> None:
    from foredraft.kinds.tables import POLICIES

    guide = (ROOT / "docs/guides/policies.md").read_text(encoding="utf-8")
    assert ROWS.findall(guide) == list(POLICIES)
    rows = {name: line for line in guide.splitlines() for name in ROWS.findall(line)}
    for name, kind in POLICIES.items():
        told = {f"{key}={value.default}" for key, value in kind.settings.items()}
        assert set(re.findall(r"`([\w]+=[^`]+)`", rows[name])) == told, name


def test_the_guides_name_every_drafter_and_every_option_of_a_request() -> None:
    from foredraft import SamplingParams
    from foredraft.kinds.tables import DRAFTERS

    guides = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs/guides").glob("*.md")}
    assert ROWS.findall(guides["drafters"]) == list(DRAFTERS)
    for option in SamplingParams.__dataclass_fields__:
        assert any(re.search(rf"`{option}\b", text) for text in guides.values()), option
