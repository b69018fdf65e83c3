"""MXFP8 and FP8 training numerics: exact, measured, and honest on every GPU."""

from gemworks.precision.backends import DeviceSpec, PrecisionCostWarning, explain, support_table
from gemworks.precision.convert import ConversionReport, MXLinear, convert, fall_back_where_inexact, revert, set_step
from gemworks.precision.formats import Format, decode, element_spec, encode
from gemworks.precision.grouped import explain_grouped, mx_grouped_linear
from gemworks.precision.hadamard import Hadamard, hadamard_inverse, hadamard_transform
from gemworks.precision.jagged import JaggedMX, quantize_jagged
from gemworks.precision.linear import mx_linear
from gemworks.precision.mxtensor import MXTensor
from gemworks.precision.probe import ProbeReport, probe
from gemworks.precision.quantization import quantize, quantize_both, quantize_square
from gemworks.precision.recipe import GemmKind, GemmRecipe, Recipe, Save, recipe
from gemworks.precision.regroup import regroup
from gemworks.precision.rng import Stochastic
from gemworks.precision.scales import ScaleMode
from gemworks.precision.tensor_scaling import TensorPlane, quantize_tensor

__all__ = [
    "ConversionReport",
    "DeviceSpec",
    "Format",
    "GemmKind",
    "GemmRecipe",
    "Hadamard",
    "JaggedMX",
    "MXLinear",
    "MXTensor",
    "PrecisionCostWarning",
    "ProbeReport",
    "Recipe",
    "Save",
    "ScaleMode",
    "Stochastic",
    "TensorPlane",
    "convert",
    "decode",
    "element_spec",
    "encode",
    "explain",
    "explain_grouped",
    "fall_back_where_inexact",
    "hadamard_inverse",
    "hadamard_transform",
    "mx_grouped_linear",
    "mx_linear",
    "probe",
    "quantize",
    "quantize_both",
    "quantize_jagged",
    "quantize_square",
    "quantize_tensor",
    "recipe",
    "regroup",
    "revert",
    "set_step",
    "support_table",
]
