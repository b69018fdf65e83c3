"""`PlaneWeight`: what layers know of a weight that exists only as codes and scales."""

from __future__ import annotations

from gemworks.precision.mxtensor import MXTensor
from torch import Tensor


class PlaneWeight(Tensor):
    """A weight that exists only as a plane, for autograd and FSDP2 a tensor all the same.

    Attributes:
        is_square: does one scale serve a square, so that the plane's transpose is a plane too?
    """

    is_square: bool

    def plane(self) -> MXTensor:
        """The weight."""
        raise NotImplementedError
