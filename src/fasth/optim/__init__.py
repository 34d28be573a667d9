"""Parameter groups and an optimizer for models with SVDs: learning rates, angles and weight decay."""

from fasth.optim.adamw import AdamW
from fasth.optim.groups import param_groups

__all__ = ["AdamW", "param_groups"]
