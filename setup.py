"""What pyproject.toml cannot say: the long description is README.md with absolute links, for a package index's page."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent


def absolute(text: str) -> str:
    """`text` with links and images that point into the repository pointing to the project's own address instead."""
    base = re.search(r'^Source = "(.*)"', (HERE / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE).group(1)
    pictures = (".png", ".svg", ".jpg", ".gif")

    def replaced(found: re.Match) -> str:
        before, target, after = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found.group()
        return f"{before}{base}/{'raw' if target.endswith(pictures) else 'blob'}/main/{target}{after}"

    return re.sub(r'(\]\(|(?:src|href)=")([^)\s"]+)([)"])', replaced, text)


if __name__ == "__main__":
    setup(
        long_description=absolute((HERE / "README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
    )
