"""MXFP8 and FP8 training numerics: exact, measured, and honest on every GPU."""

from gemworks.precision.formats import Format, decode, element_spec, encode
from gemworks.precision.hadamard import Hadamard, hadamard_inverse, hadamard_transform
from gemworks.precision.jagged import JaggedMX, quantize_jagged
from gemworks.precision.mxtensor import MXTensor
from gemworks.precision.quantization import quantize, quantize_both, quantize_square
from gemworks.precision.regroup import regroup
from gemworks.precision.rng import Stochastic
from gemworks.precision.scales import ScaleMode

__all__ = [
    "Format",
    "Hadamard",
    "JaggedMX",
    "MXTensor",
    "ScaleMode",
    "Stochastic",
    "decode",
    "element_spec",
    "encode",
    "hadamard_inverse",
    "hadamard_transform",
    "quantize",
    "quantize_both",
    "quantize_jagged",
    "quantize_square",
    "regroup",
]
