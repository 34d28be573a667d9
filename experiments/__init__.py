"""Experiments that train networks for an hour to find something out; README.md describes them. Not in the wheel."""

from importlib.util import find_spec

for package in ("matplotlib", "numpy", "rich", "sklearn"):
    if find_spec(package) is None:
        raise ModuleNotFoundError(f"the experiments need {package}, which comes with: pip install '.[study]'")
