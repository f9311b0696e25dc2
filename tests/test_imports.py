"""Every module can be imported with the packages that are installed, whatever their versions."""

import pkgutil
from importlib import import_module
from importlib.util import find_spec

import vocagnolm
import vocagnolm_studies

# modules of ours that only their package uses
PLUGINS = {"vocagnolm.integrations.axolotl": "axolotl"}


def test_every_module_is_imported():
    packages = (vocagnolm, vocagnolm_studies)
    names = [
        module.name
        for package in packages
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not module.name.endswith("__main__")
    ]
    assert len(names) > 90
    for name in names:
        needed = "triton" if ".triton_" in name else PLUGINS.get(name)
        if needed is None or find_spec(needed):
            import_module(name)
