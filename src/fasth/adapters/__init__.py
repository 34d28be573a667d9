"""Parameter-efficient fine-tuning: adapters beside frozen layers. They start as the identity and merge into weights.

model = adapters.add(model, "reflections", r=8, target=("q_proj", "v_proj"))
optimizer = torch.optim.AdamW(fasth.param_groups(model, lr=1e-3))
"""

from fasth.adapters.adapted import Adapted
from fasth.adapters.checkpoint import load, save
from fasth.adapters.kinds import Adapter
from fasth.adapters.merging import merge, merge_and_restart, unmerge
from fasth.adapters.model import add, disabled, remove, use
from fasth.adapters.report import AdapterReport, Report, report

__all__ = [
    "Adapted",
    "Adapter",
    "AdapterReport",
    "Report",
    "add",
    "disabled",
    "load",
    "merge",
    "merge_and_restart",
    "remove",
    "report",
    "save",
    "unmerge",
    "use",
]
