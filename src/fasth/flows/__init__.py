"""Layers for normalizing flows.

``SVDTransform`` is for ``torch.distributions`` and Pyro. ``fasth.flows.nflows``, ``.normflows``, ``.freia`` and
``.zuko`` have a class of the same name for those libraries. Importing fasth imports none of them.

``HouseholderTransform``, ``SylvesterTransform`` and ``QRTransform`` are made of tensors, which an encoder may make for
each sample. ``whiten_`` gives a layer its start from data.
"""

from fasth.flows.householder import HouseholderTransform
from fasth.flows.qr import QRTransform
from fasth.flows.sylvester import SylvesterTransform
from fasth.flows.transform import SVDTransform
from fasth.flows.whiten import whiten_

__all__ = ["HouseholderTransform", "QRTransform", "SVDTransform", "SylvesterTransform", "whiten_"]
