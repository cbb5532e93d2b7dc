"""What the repository promises as a whole: import floors, quick starts, and a README that is true."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from checkpoints import save_checkpoint

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SETUP = "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt "


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[number]


def python(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, encoding="utf-8", timeout=240, **options
    )
    assert done.returncode == 0, done.stderr
    return done


def test_imports_run_downwards_only() -> None:
    python("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", cwd=ROOT)


def test_every_room_has_a_floor() -> None:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [layers] = [c["layers"] for c in configuration["contracts"] if c["type"] == "layers"]
    named = {room for layer in layers for room in re.findall(r"foredraft\.(\w+)", layer)}
    rooms = {
        path.stem for path in (ROOT / "src/foredraft").iterdir() if not path.name.startswith(("_", "py."))
    }
    assert rooms - {"demo"} <= named, "a room without a floor"


@pytest.mark.parametrize(
    "statement",
    [
        "import foredraft",
        "import foredraft.cli",
        "import foredraft; foredraft.cli.main(['generate', '--help'])",
    ],
)
def test_torch_waits_until_it_is_needed(statement: str) -> None:
    statement = statement.replace("foredraft; foredraft.cli", "foredraft.cli; foredraft.cli")
    heavy = "[m for m in ('torch', 'numpy', 'tokenizers', 'rich.progress') if m in sys.modules]"
    code = f"import sys; {statement}; print({heavy}); import os; print(sum(os.times()[:2]))"
    loaded, seconds = python("-c", code).stdout.splitlines()[-2:]
    assert loaded == "[]"
    assert float(seconds) < 1  # of processor time: a busy machine does not count


def test_the_readme_opens_with_one_sentence() -> None:
    first = README.splitlines()[0]
    assert first.startswith("Foredraft ")
    assert first.endswith(".")
    assert README.splitlines()[1] == ""


def test_the_two_readme_commands_are_those_that_the_checks_run() -> None:
    job, tests = block("sh", 0).strip(), block("sh", 1).strip()
    assert job == SETUP + ". && .venv/bin/foredraft generate --compare"
    assert tests == SETUP + "-e '.[dev]' && .venv/bin/python -m pytest"
    script = (ROOT / ".ci/run").read_text()
    patterns = re.findall(r"^(job|tests)=\"\$\(grep -m1 -E '([^']+)' README\.md\)\"$", script, re.MULTILINE)
    for name, pattern in patterns:
        [found] = [line for line in README.splitlines() if re.search(pattern, line)]
        assert found == {"job": job, "tests": tests}[name]
    assert len(patterns) == 2
    for part in ("${job##* && }", "${tests% && *}", "${tests##* && }"):
        assert f'bash -euo pipefail -c "{part}"' in script


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


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the README's ./big, ./small and prompt.txt are, and a `foredraft` on the path."""
    folder = tmp_path_factory.mktemp("readme")
    save_checkpoint(folder / "big", tokenizer=True, seed=1, eos_token_id=None)
    save_checkpoint(folder / "small", tokenizer=True, seed=2, eos_token_id=None, num_hidden_layers=1)
    (folder / "prompt.txt").write_text("def accept(draft, p, q):\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("line", block("sh", 2).splitlines(), ids=lambda line: line.split("  ")[0])
def test_the_readme_examples_run(models: Path, line: str) -> None:
    words = shlex.split(line, comments=True)
    given = None
    if "<" in words:
        *words, _, file = words
        given = (models / file).read_text(encoding="utf-8")
    assert words[0] == "foredraft"
    done = python("-m", "foredraft.cli", *words[1:], cwd=models, input=given)
    assert done.stdout.strip()


def test_the_readme_python_runs(models: Path) -> None:
    assert python("-c", block("python"), cwd=models).stdout


@pytest.mark.parametrize("file", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_the_examples_run(file: str, tmp_path: Path) -> None:
    assert python(str(ROOT / "examples" / file), cwd=tmp_path).stdout


def test_the_readme_names_every_drafter_and_policy() -> None:
    from foredraft.build import DRAFTERS, POLICIES

    rows = re.findall(r"^\| `([\w-]+)` \|", README, re.MULTILINE)
    assert sorted(rows) == sorted([*DRAFTERS, *POLICIES, "speculative", "coupled"])


@pytest.mark.parametrize(
    "document",
    ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/losslessness.md", "docs/log.md"],
)
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert ((ROOT / document).parent / target).exists(), target
