"""What a public repository has beside its code: that it is there, whole, and says one thing."""

import re
import runpy
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


def test_the_license_is_the_one_that_the_package_names():
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0"
    assert text.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert "9. Accepting Warranty or Additional Liability." in text
    assert text.rstrip().endswith("limitations under the License.")


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert citation["cff-version"] == "1.2.0"
    assert citation["authors"]


def test_ci_runs_the_gate_on_every_python_that_is_promised():
    workflow = yaml.safe_load(WORKFLOW.read_text())
    (job,) = workflow["jobs"].values()
    promised = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", c)}
    assert promised
    assert promised <= set(job["strategy"]["matrix"]["python"])
    assert job["steps"][-1] == {"run": "make test"}
    assert workflow["permissions"] == {"contents": "read"}


def test_issue_forms_ask_for_what_their_words_promise():
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")}
    assert {"bug", "idea", "config"} <= set(forms)
    for name in ("bug", "idea"):
        fields = forms[name]["body"]
        assert forms[name]["name"]
        assert len({field["id"] for field in fields}) == len(fields)
        assert any(field.get("validations", {}).get("required") for field in fields)
    assert "pipeline --version" in str(forms["bug"])


def test_no_text_proposes_a_name_that_a_stranger_could_register():
    """The package is on no index: `pip install` of its name or its extras runs the code of whoever takes the name."""
    name = PROJECT["name"]
    proposed = re.compile(rf"pip install [^\n#]*?(?<![\w/.-]){name}\b|{name}\[")
    shown = (
        "*",
        ".github",
        "benchmarks",
        "docker",
        "docs",
        "examples",
        "experiments",
        "pipeline",
        "templates",
        "tests",
    )
    files = (path for folder in shown for path in (ROOT.glob("*.*") if folder == "*" else (ROOT / folder).rglob("*")))
    texts = (path for path in files if path.suffix in {".md", ".py", ".yaml", ".yml", ".toml", ".ipynb", ".sh", ".txt"})
    found = [path.relative_to(ROOT) for path in texts if proposed.search(path.read_text(errors="replace"))]
    assert found == []


def test_every_link_of_the_documents_leads_somewhere():
    pages = [
        *ROOT.glob("*.md"),
        *(path for name in ("docs", "examples", "experiments") for path in (ROOT / name).rglob("*.md")),
    ]
    for page in pages:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"


CODE = "".join(path.read_text() for path in (ROOT / "tests").glob("*/**/test_*.py"))


def test_the_page_of_promises_is_the_current_one():
    written = runpy.run_path(str(ROOT / "tests" / "promises.py"))["page"]()
    assert (ROOT / "tests" / "PROMISES.md").read_text() == written, "run: make schema"
    assert len(re.findall(r"(?m)^\| .+ \| `", written)) > 80


def test_every_test_that_the_documents_name_is_there():
    for page in [ROOT / "CONTRIBUTING.md", ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for place in re.findall(r"`((?:tests/[\w/]+/)?test_\w+\.py)(?:::\w+(?:\.\.\.)?)?`", page.read_text()):
            assert (ROOT / place).exists() if "/" in place else found(place), f"{page.name}: {place}"
        for name in re.findall(r"::(test_\w+)`", page.read_text()):
            assert f"def {name}(" in CODE, f"{page.name}: {name}"


def test_each_test_file_has_a_name_of_its_own():
    """As pytest imports them by it."""
    names = [path.name for path in (ROOT / "tests").glob("*/**/test_*.py")]
    assert sorted(names) == sorted(set(names))


def found(name):
    return list((ROOT / "tests").glob(f"*/**/{name}"))
