"""What the documentation says exists: pages, files, make's targets and variables, commands, flags, fields."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from eagle_cli.catalog import STAGES
from eagle_cli.flags import flag
from stages.bench.compare import Comparison
from stages.bench.parity import ParityResult
from stages.bench.result import BenchResult
from stages.convert.stage import ConvertResult
from stages.extract_features.estimate import FeaturesEstimate
from stages.extract_features.stage import ExtractFeaturesResult
from stages.gen_data.result import GenDataPlan, GenDataResult
from stages.inspect.result import InspectResult
from stages.serve.server import FLUSH_S
from stages.serve.stage import OtherEngine, ServeResult
from stages.train.result import TrainResult

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
SCRIPTS = [
    ROOT / "Makefile",
    *(path for path in sorted((ROOT / "examples").iterdir()) if path.suffix != ".ipynb"),
]
FLAGS = {stage.name: {flag(name) for name in stage.config_class().model_fields} for stage in STAGES}
SHARED = {"--json", "--quiet", "--version", "--help"}
RESULTS = {
    "gen-data": (GenDataResult, GenDataPlan),
    "extract-features": (ExtractFeaturesResult, FeaturesEstimate),
    "train": (TrainResult,),
    "serve": (ServeResult, OtherEngine),
    "bench": (BenchResult, Comparison, ParityResult),
    "convert": (ConvertResult,),
}


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Every `eagle STAGE ...` of a text: the stage and the flags behind it, up to the end of the command."""
    text = re.sub(r"\\\n\s*", " ", text)
    for match in re.finditer(rf"\beagle ({'|'.join(FLAGS)})\b([^\n`#|;]*)", text):
        yield match[1], re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", re.sub(r"'[^']*'|,args=.*", "", match[2]))


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [PAGES[0]]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        named = re.findall(r"\]\(([^)#]+\.md)", page.read_text())
        there = {(page.parent / name).resolve() for name in named}
        there |= {ROOT / name for name in re.findall(r"`(docs/[\w-]+\.md)`", page.read_text())}
        waiting += there - reached - set(waiting)
    assert reached == set(PAGES)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_and_files_are_there(page: Path) -> None:
    text = page.read_text()
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        there = page.parent / path if path else page
        assert there.exists(), path
        if anchor:
            assert anchor in {slug(each) for each in re.findall(r"^#+ (.*)$", there.read_text(), re.M)}, (
                anchor
            )
    for name in re.findall(r"`((?:stages|kernels|tests|benchmarks|examples|docs|eagle_cli)/[\w./-]+)", text):
        assert (ROOT / name).exists() or (ROOT / f"{name}.py").exists(), name
    ours = {
        path.name for package in ("stages", "kernels", "eagle_cli") for path in (ROOT / package).rglob("*")
    }
    for name in re.findall(r"`(?!tests/|benchmarks/)(?:\w+/)?(\w+\.(?:py|h|cpp))`", text):
        assert name in ours | {"prepare_data.py"}, name  # the latter is of speculators


@pytest.mark.parametrize("page", [*PAGES, *SCRIPTS], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_the_flags_that_are_written(page: Path) -> None:
    for stage, flags in commands(page.read_text()):
        unknown = {each for each in flags if each not in FLAGS[stage] | SHARED}
        assert {f"--{each.removeprefix('--no-')}" for each in unknown} <= FLAGS[stage], f"eagle {stage}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_make_has_the_targets_and_variables_that_are_written(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets, variables = (
        re.findall(r"^([a-z-]+):", makefile, re.M),
        re.findall(r"^([A-Z_]+) =", makefile, re.M),
    )
    text = re.sub(r"\\\n\s*", " ", page.read_text())
    for line in re.findall(r"(?:`|^    )make ([a-z-][^`\n]*)", text, re.M):
        words = shlex.split(line.partition("#")[0])
        assert words[0] in targets, line
        assert {word.partition("=")[0] for word in words if "=" in word} <= {*variables, "PYTEST_FLAGS"}, line


def test_json_fields_are_those_of_the_results() -> None:
    table = (ROOT / "docs/cli.md").read_text().partition("## What --json prints")[2].partition("\n## ")[0]
    for stage, models in RESULTS.items():
        (row,) = re.findall(rf"^\| `{stage}` \| (.*) \|$", table, re.M)
        written = set(re.findall(r"`([a-z_]+)`", row))
        fields = {name for model in models for name in model.model_fields}
        assert written == fields, stage


def test_inspect_fields_are_those_of_its_result() -> None:
    text = (ROOT / "docs/cli.md").read_text()
    table = text.partition("keep their names:")[2].partition("\n\n|")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.M)
    written = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert written == set(InspectResult.model_fields) | {"error"}


def test_the_kubernetes_job_sets_flags_that_are_there() -> None:
    job = yaml.safe_load((ROOT / "examples/kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    stage = next(each for each in STAGES if each.name == "extract-features")
    known = {stage.environment_variable(name) for name in stage.config_class().model_fields}
    assert {each["name"] for each in container["env"]} <= known
    assert int(container["env"][0]["value"]) == job["spec"]["completions"]


def test_the_kubernetes_deployment_sets_flags_that_are_there_and_asks_paths_that_are_served() -> None:
    deployment, service = yaml.safe_load_all((ROOT / "examples/kubernetes-serve.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    stage = next(each for each in STAGES if each.name == "serve")
    known = {stage.environment_variable(name) for name in stage.config_class().model_fields}
    assert {each["name"] for each in container["env"]} <= {*known, "EAGLE_API_KEY"}
    probes = {container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert probes == {"/health", "/version"}
    assert container["ports"][0]["containerPort"] == stage.config_class().model_fields["port"].default
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace = values["EAGLE_SERVE_SHUTDOWN_TIMEOUT"]
    most = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert before + int(grace) + FLUSH_S < most, "else the pod is killed while its requests finish"
