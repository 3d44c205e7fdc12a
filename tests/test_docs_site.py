"""The documentation as a site: every page can be reached, every link leads somewhere, and the notebooks run."""

import json
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LLMS = runpy.run_path(str(DOCS / "site" / "llms.py"))
REFERENCE = runpy.run_path(str(DOCS / "site" / "reference.py"))
NOTEBOOKS = sorted(DOCS.glob("notebooks/*.ipynb"))
PAGES = [*sorted(DOCS.glob("*.md")), *NOTEBOOKS]
READ = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "llms.txt"))]
NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]


def cells(path: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def text_of(path: Path) -> str:
    """Return a page's text without blocks of code."""
    if path.suffix == ".ipynb":
        return "\n\n".join("".join(cell["source"]) for cell in cells(path, "markdown"))
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as code hosts and the site make them."""
    headings = re.findall(r"^#+ (.*)$", text_of(path), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in plain}


def test_the_navigation_has_every_page_once_and_no_other():
    listed = list(LLMS["pages"](NAV))
    made = [f"reference/{name}.md" for name in REFERENCE["PAGES"]]
    assert sorted(listed) == sorted([*(str(page.relative_to(DOCS)) for page in PAGES), *made]), (
        "a page of docs/ is missing in, or a line too many in, nav of mkdocs.yml"
    )


@pytest.mark.parametrize("page", READ, ids=[page.name for page in READ])
def test_every_link_of_a_page_leads_to_a_file_and_a_heading_that_exist(page):
    for link, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)(?:#([\w-]+))?\)", text_of(page)):
        target = (page.parent / link).resolve() if link else page
        assert target.is_file(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}#{anchor}"


def test_llms_txt_is_what_the_pages_say():
    assert (ROOT / "llms.txt").read_text(encoding="utf-8") == LLMS["text"](), "python docs/site/llms.py > llms.txt"


def test_the_reference_names_what_the_package_exports():
    names = REFERENCE["public_names"]
    assert {"hybridrl.sdk.data_queue.DataQueue", "hybridrl.sdk.rpc_endpoints.rpc"} <= set(names("hybridrl.sdk"))
    assert "hybridrl.algos.policy_losses.weighted.cispo" in names("hybridrl.algos.policy_losses")
    assert "hybridrl.errors.WorkerLost" in names("hybridrl.errors")
    assert min(len(names(module)) for module in REFERENCE["PAGES"].values()) >= 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_has_the_small_outputs_of_one_run_and_names_no_directory_of_a_machine(path):
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "make notebooks"
    text = path.read_text(encoding="utf-8")
    assert len(text) < 100_000 and not re.search(r"\"?/(home|root|tmp|work)/", text)
    assert not [output for cell in code for output in cell["outputs"] if output["output_type"] == "error"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not (find_spec("nbclient") and find_spec("ipykernel")), reason="pip install -e '.[docs]'")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_every_cell_of_a_notebook_runs(path, tmp_path):
    command = [sys.executable, DOCS / "site" / "execute.py", path, "--into", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stderr[-4000:]
    assert cells(tmp_path / path.name, "code")[-1]["execution_count"] == len(cells(path, "code"))
