"""The addresses in the package's metadata. All else stands in pyproject.toml."""

from setuptools import setup

REPOSITORY = ""
"""The address of the public repository, without a slash at its end. Empty while there is none."""


def addresses(repository: str) -> dict[str, str]:
    places = {
        "Source": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
    }
    return {"Paper": "https://arxiv.org/abs/2503.19123"} | (places if repository else {})


setup(project_urls=addresses(REPOSITORY))
