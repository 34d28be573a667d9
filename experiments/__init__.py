"""Experiments that train networks for an hour to find something out; README.md describes them. Not in the wheel."""
