"""Writes .github/workflows/ from ci/matrix.yaml; with --check says whether they are current and changes nothing.

    python ci/workflows.py [--check]

Each group of the matrix is one workflow. A lane is one job that checks out the tree, runs one script of this folder
with the lane's fields in its environment, and uploads what the script kept in ci-out/.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".github" / "workflows"
HEAD = "# Written by ci/workflows.py from ci/matrix.yaml: change those.\n"
WHEN = {
    "hosted": {"push": None, "pull_request": None},
    "full": {
        "schedule": [{"cron": "0 3 * * 0"}],
        "workflow_dispatch": None,
        "push": {"branches": ["release/**"]},
    },
    "nightly": {"schedule": [{"cron": "0 2 * * *"}], "workflow_dispatch": None},
    "triton": {"schedule": [{"cron": "0 3 * * 1"}], "workflow_dispatch": None},
    "vendors": {"workflow_dispatch": None, "push": {"branches": ["release/**"]}},
}
"""Group of the matrix -> the events that start it."""
ENVIRONMENT = {
    "torch": "TORCH",
    "index": "INDEX",
    "triton": "TRITON",
    "transformers": "TRANSFORMERS",
    "trl": "TRL",
    "full": "FULL",
}
"""Field of a lane -> the variable its script reads (ci/common.sh)."""
FIELDS = {"script", "python", "arch", "runner", *ENVIRONMENT}
MINUTES = 90
MINUTES_OF_A_VENDOR = 240  # its lane compiles every kernel on the way, tunes for 15 minutes and times


def workflow(group: str, lanes: list[dict]) -> dict:
    """One workflow: the lanes of a group as jobs. Raises `ValueError` for a lane that could not run."""
    jobs = {}
    for lane in lanes:
        name = job_name(lane)
        if name in jobs:
            raise ValueError(f"{group}: two lanes are called {name}")
        jobs[name] = job(lane, name)
    return {"name": group, "on": WHEN[group], "permissions": {"contents": "read"}, "jobs": jobs}


def job_name(lane: dict) -> str:
    words = [lane["script"].removesuffix(".sh"), lane.get("arch"), f"py{lane['python']}"]
    words += [f"{field}{lane[field]}" for field in ("triton", "transformers", "trl") if field in lane]
    return "-".join(word for word in words if word).replace(".", "_")


def job(lane: dict, name: str) -> dict:
    if unknown := set(lane) - FIELDS:
        raise ValueError(f"{name}: unknown fields {sorted(unknown)}; known: {sorted(FIELDS)}")
    if not (ROOT / "ci" / lane["script"]).is_file():
        raise ValueError(f"{name}: there is no ci/{lane['script']}")
    return {
        "runs-on": lane.get("runner", "ubuntu-latest"),
        "timeout-minutes": MINUTES_OF_A_VENDOR if "runner" in lane else MINUTES,
        "env": {variable: str(lane[field]) for field, variable in ENVIRONMENT.items() if field in lane},
        "steps": [
            {"uses": "actions/checkout@v4"},
            {"uses": "actions/setup-python@v5", "with": {"python-version": lane["python"]}},
            {"run": f"bash ci/{lane['script']}"},
            {
                "if": "always()",
                "uses": "actions/upload-artifact@v4",
                "with": {"name": name, "path": "ci-out", "if-no-files-found": "ignore"},
            },
        ],
    }


def rendered() -> dict[Path, str]:
    """File -> the text it should have."""
    matrix = yaml.safe_load((ROOT / "ci" / "matrix.yaml").read_text())
    if set(matrix) != set(WHEN):
        raise ValueError(f"ci/matrix.yaml has the groups {sorted(matrix)}, ci/workflows.py knows {sorted(WHEN)}")
    return {
        FOLDER / f"{group}.yml": HEAD + yaml.safe_dump(workflow(group, lanes), sort_keys=False, width=120)
        for group, lanes in matrix.items()
    }


def main(arguments: list[str]) -> int:
    wanted = rendered()
    present = {path: path.read_text() for path in FOLDER.glob("*.yml")} if FOLDER.is_dir() else {}
    if arguments == ["--check"]:
        stale = sorted(path.name for path in {*wanted, *present} if wanted.get(path) != present.get(path))
        for name in stale:
            print(f".github/workflows/{name} is not what ci/matrix.yaml says; run: python ci/workflows.py")
        return int(bool(stale))
    if arguments:
        print(__doc__)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in present.keys() - wanted.keys():
        path.unlink()
    for path, text in wanted.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
