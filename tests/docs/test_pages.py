"""What the pages tell users to do works: their Python runs on a tiny model, their commands parse, the site builds."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
GUIDES = [ROOT / "docs" / f"{name}.md" for name in ("activations", "distributed", "losses", "moe", "safety")]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/start/*.md")), *sorted(ROOT.glob("docs/guides/*.md")), *GUIDES]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language; those in tabs and lists lose their indent."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return ["\n".join(line.removeprefix(indent) for line in text.splitlines()) for indent, text in found]


def pages(language: str, pattern: str = "") -> list:
    """The pages that have such a block, by their names."""
    having = [page for page in PAGES if any(re.search(pattern, text) for text in blocks(page, language))]
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in having]


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """A namespace with what the pages take for granted; the hub answers with a model of two layers."""
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name, **_: Qwen3ForCausalLM(config))
    monkeypatch.chdir(tmp_path)
    ids = torch.randint(96, (2, 8))
    x = torch.randn(6, 32, requires_grad=True)
    return {
        "torch": torch, "model": model, "ids": ids, "batches": [ids, ids], "wrap": lambda module: module,
        "AutoModelForCausalLM": AutoModelForCausalLM, "name": "a/model", "batch": {"input_ids": ids, "labels": ids},
        "x": x, "weight": torch.ones(32), "gate": x, "up": x, "head": torch.randn(96, 32), "labels": ids.flatten()[:6],
    }  # fmt: skip


@pytest.fixture
def patches_taken_back(monkeypatch):
    """Whatever a page patches is given back after it: its classes belong to the tests that follow."""
    from liger_hw.transformers.report import PatchReport

    reports, remember = [], PatchReport.remember

    def noted(report):
        reports.append(report)
        remember(report)

    monkeypatch.setattr(PatchReport, "remember", noted)
    yield
    for report in reversed(reports):
        report.revert()


def given_to_losses(tiny):
    """What docs/losses.md takes for granted: hidden states of pairs and of a reference model."""
    hidden, ids = torch.randn(2, 8, 32), tiny["ids"]
    return {
        "hidden_states": hidden, "ref_hidden_states": hidden, "labels": ids, "input_ids": ids,
        "ref_model": tiny["model"], "advantages": torch.ones(2, 8),
    }  # fmt: skip


def given_on_a_rank(tiny, group):
    """What docs/distributed.md takes for granted: the hidden states of a model, its head, and a loss of one's own."""
    x, ids = tiny["x"], tiny["ids"]
    return {
        "fully_shard": lambda module: module,
        "hidden": x, "hidden_rows": x, "weight": tiny["head"], "target": tiny["labels"], "group": group,
        "dpo": lambda weight, x, target, bias: (torch.nn.functional.cross_entropy(x @ weight.T, target),),
        "tokens": ids, "positions": torch.arange(8).expand(2, 8), "shifted": ids, "items": 16,
    }  # fmt: skip


@pytest.mark.parametrize("page", pages("python"))
def test_python_runs(page, tiny, patches_taken_back, request):
    """The blocks of a page one after the other, as a reader would run them."""
    import liger_hw

    namespace = dict(tiny, liger_hw=liger_hw)
    if page.name == "distributed.md":
        request.getfixturevalue("clean_registry")  # it tunes for what was missed, which is not to be by other tests
        namespace |= given_on_a_rank(tiny, request.getfixturevalue("one_rank"))
    if page.name == "float8.md":  # leaves narrow linears alone
        namespace["model"] = torch.nn.Sequential(torch.nn.Linear(512, 512))
    if page.name == "losses.md":
        namespace |= given_to_losses(tiny)
    for number, text in enumerate(blocks(page, "python")):
        if "liger_hw.megatron" in text:
            continue  # tests/distributed/test_megatron.py calls it, beside a Megatron-core
        if "liger_hw.trl" in text:
            continue  # tests/compat/test_trl_head.py calls it, beside TRL
        if "kernel_config" in text or "KernelConfig" in text or "kernelize" in text:
            continue  # tests/hub/test_kernels_route.py calls them, beside the kernels package
        for package in ("peft", "accelerate"):
            if package in text:
                pytest.importorskip(package)
        exec(compile(text, f"{page.name}, block {number}", "exec"), namespace)


COMMAND = re.compile(r"(?:^|[(\s])liger-hw ([a-z]\w*[^\n()#]*)")


@pytest.mark.parametrize("page", pages("bash", "liger-hw [a-z]"))
def test_commands_parse(page):
    """Each `liger-hw ...` of a page has a command and options that exist."""
    from liger_hw.cli import parser_of

    for words in COMMAND.findall("\n".join(blocks(page, "bash"))):
        name, *options = shlex.split(words)
        parser_of(name).parse_args(options)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_a_page_begins_with_its_readers(page):
    assert page.read_text().split("\n\n")[1].startswith("For ")


def test_every_record_that_a_page_names_is_there():
    """Records of runs, and the tables of a device, both named after it."""
    there = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    there |= {path.name for path in ROOT.glob("liger_hw/backends/*/configs/*.json")}
    there |= {name.removesuffix(".gz") for name in there}
    names = re.compile(r"(?<![\w*<>-])[\w.-]+-(?:h200|h100|cpu|cuda)\.jsonl?")
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
    named = {name: page.name for page in pages for name in names.findall(page.read_text())}
    assert len(named) > 30
    assert {name: page for name, page in named.items() if name not in there} == {}


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 200 and len(text.split()) <= 1200


def test_the_readme_links_to_files():
    links = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text())
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_pages_link_to_files():
    """Relative links of the site's pages, to files or to pages that ci/site.py makes; anchors are `make docs`'s."""
    missing, nav = [], (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)#\s]+)", text):
            to = Path(os.path.normpath(page.parent / link))
            if "://" in link or link.startswith("mailto:") or to.exists():
                continue
            if f": {os.path.relpath(to, ROOT / 'docs')}\n" not in nav:
                missing.append(f"{page.relative_to(ROOT)}: {link}")
    assert not missing


@pytest.mark.full  # `make docs`
def test_the_site_builds(tmp_path):
    """In strict mode: a broken link, an anchor that is not there or a page without a place is an error."""
    pytest.importorskip("mkdocs")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)],
        cwd=ROOT, env=dict(os.environ, NO_MKDOCS_2_WARNING="1"), capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    assert "liger_rms_norm" in (tmp_path / "reference/api/index.html").read_text()
