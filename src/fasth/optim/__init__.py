"""What an optimizer should know of a model with SVDs: the rates, the angles and the decay with which it trains well."""

from fasth.optim.adamw import AdamW
from fasth.optim.groups import param_groups

__all__ = ["AdamW", "param_groups"]
