"""What the documents say is so."""

import doctest
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_numbers_of_bytes_md_are_computed_again() -> None:
    failed, attempted = doctest.testfile(str(ROOT / "docs/bytes.md"), module_relative=False)
    assert attempted > 20
    assert failed == 0


def test_the_plan_in_the_readme_is_what_the_command_prints() -> None:
    block = re.search(r"```\n\$ (kvist plan [^\n]*)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block
    command = [sys.executable, "-m", "kvist", *shlex.split(block[1])[1:]]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.rstrip() == block[2].rstrip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_map_shows_every_package_and_no_file_that_is_gone() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    drawing = text.split("```")[1]
    source = ROOT / "src/kvist"
    files = {path.name for path in source.rglob("*.py")}
    for name in re.findall(r"([a-z_]+\.py)\b", text):
        assert name in files, f"the map shows {name}"
    for path in source.iterdir():
        if path.is_dir() and path.name != "__pycache__":
            assert f"  {path.name}/" in drawing, f"the map lacks {path.name}/"


def test_every_dependency_has_its_line() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    page = (ROOT / "docs/dependencies.md").read_text()
    for requirement in wanted:
        name = re.split(r"[\[<>=]", requirement)[0]
        assert name == "kvist" or re.search(rf"^\|[^|]*\b{name}\b", page, re.MULTILINE), f"{name} has no line"


def test_every_make_target_that_the_documents_name_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for name in re.findall(r"`?make ([a-z-]+)[`\s]", page.read_text()):
            assert name in targets, f"{page.name} names make {name}"
