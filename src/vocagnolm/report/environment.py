"""What a page or a run was made with: versions that decide results. No torch is imported."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("vocagnolm", "torch", "transformers", "tokenizers", "accelerate", "numpy")


def environment() -> dict[str, str]:
    found = {"python": platform.python_version(), "system": platform.system()}
    if machine := platform.machine():
        found["machine"] = f"{machine}, {os.cpu_count()} cores"
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
