"""By what the model is computed: one frozen record that model code reads and nothing else changes. Imports no torch.

Every choice here leaves the function that the model computes alone (up to rounding; FP8 excepted), so two runs that
differ in it alone are comparable. That is what the ablation ladder does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gemworks.gem.config_checks import check_counts
from gemworks.gem.typed_config import ConfigError

Layout = Literal["jagged", "padded"]
SelfAttentionKernel = Literal["gemworks", "varlen", "sdpa"]
PoolKernel = Literal["gemworks", "varlen", "sdpa"]
PffnKernel = Literal["gemworks", "matmul"]
PffnWeightsKernel = Literal["torch", "gemworks"]
NormKernel = Literal["gemworks", "torch"]
CompileScope = Literal["dense", "layers", "all"]
ActivationPolicy = Literal[
    "keep", "recompute", "recompute_cheap", "recompute@0.5", "quantise", "offload", "quantise_offload"
]


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """What each part of the model runs on.

    Attributes:
        layout: of sequences between the layers: packed rows, or every sequence padded to the batch's bound.
        attention: self-attention by gemworks.jagged, torch's `varlen_attn` (a GPU only), or
            `scaled_dot_product_attention` (padded only).
        attention_format: of q, k and v in self-attention: autocast's, or FP8 codes of gemworks.precision; full
            attention only.
        pooling: as `attention`, of the seeds' attention.
        pffn: gemworks.jagged's GDPA, or two batched products around an activation, padded while they run.
        norm: gemworks.jagged's norms with their residuals, or torch's with the additions beside them.
        fused_qk: QK-norm and RoPE inside the ops of self-attention and softmax pooling, which take their projection as
            one tensor and return its gradient as one; otherwise op by op before them.
        fused_qk_backward: with fused_qk, the backward of the keys' norm and rotation at the end of attention's own, in
            full and windowed self-attention and in softmax pooling; block attention always does so.
        late_residual: self-attention's residual is added by whatever reads the sum next, which in a compiled layer is
            the kernel of its norms; otherwise where it arises, by the product before it, which first copies it.
        pffn_weights: the map over tokens that makes the PFFN's keys and values, plus what all samples share: batched
            products and sums, or gemworks.jagged's `token_map`, a kernel each for forward and backward.
        fused_pffn_norm: the norm after GDPA, its residual and what is added after it inside GDPA's kernel.
        experts: Wukong experts one after another, or each of their products for all of them at once.
        stream: dtype of the tokens between the layers: autocast's own, or float32, as norms under autocast leave it.
        rope_tables: dtype of the rotations' cosines and sines; float16 errs by 2^-11 of 1, less than a bf16 query does.
        share_schedule: tile schedules are built once per batch; otherwise every op builds its own.
        linears: "bf16" (plain `nn.Linear`), a recipe of gemworks.precision such as "fp8_block128", or "probe": what
            is exact enough and fastest for each layer on the first batch, measured before training.
        linears_min_features: narrower linears stay as they are.
        linears_hadamard: random Hadamard transform along the contraction of their weight gradients.
        linears_stochastic: stochastic rounding of their output gradients.
        activations: what a layer does with what it saves for backward (gemworks.netmem); "recompute@0.5" gives every
            compiled layer a budget of its own, half of what it would keep.
        compile_scope: what `train.compile` compiles: the dense parts, or whole layers, or those and what else passes
            over all events: the rotations' tables before the layers, and the head's norm and mean after them.
        compile_saves: what compiled parts keep for backward: what torch's rules of thumb say, or the least, so that a
            chain of elementwise work is computed again in backward however long it is.
    """

    layout: Layout = "jagged"
    attention: SelfAttentionKernel = "gemworks"
    attention_format: Literal["autocast", "fp8"] = "autocast"
    pooling: PoolKernel = "gemworks"
    pffn: PffnKernel = "gemworks"
    norm: NormKernel = "gemworks"
    fused_qk: bool = True
    fused_qk_backward: bool = False
    late_residual: bool = False
    pffn_weights: PffnWeightsKernel = "gemworks"
    fused_pffn_norm: bool = False
    experts: Literal["separate", "batched"] = "separate"
    stream: Literal["autocast", "float32"] = "autocast"
    rope_tables: Literal["float32", "float16"] = "float32"
    share_schedule: bool = True
    linears: str = "bf16"
    linears_min_features: int = 256
    linears_hadamard: bool = False
    linears_stochastic: bool = False
    activations: ActivationPolicy = "keep"
    compile_scope: CompileScope = "dense"
    compile_saves: Literal["usual", "least"] = "usual"

    def __post_init__(self) -> None:
        padded = self.layout == "padded"
        for name, value in (("attention", self.attention), ("pooling", self.pooling)):
            if padded != (value == "sdpa"):
                expected = "'sdpa', as kernels.layout is 'padded'" if padded else "'gemworks' or 'varlen'"
                raise ConfigError(
                    f"kernels.{name}: got {value!r}, expected {expected}; scaled_dot_product_attention takes padded "
                    f"sequences and nothing else here does"
                )
        if padded and self.pffn != "matmul":
            raise ConfigError(
                f"kernels.pffn: got {self.pffn!r}, expected 'matmul', as kernels.layout is 'padded'; GDPA takes packed "
                f"sequences"
            )
        if self.fused_pffn_norm and self.pffn != "gemworks":
            raise ConfigError(
                f"kernels.fused_pffn_norm: got True with kernels.pffn {self.pffn!r}, expected 'gemworks'; it is GDPA's "
                f"kernel that does it"
            )
        if self.attention_format == "fp8" and self.attention != "gemworks":
            raise ConfigError(
                f"kernels.attention_format: got 'fp8' with kernels.attention {self.attention!r}, expected 'gemworks'; "
                f"no other kernel here reads FP8 codes"
            )
        if self.activations == "recompute@0.5" and not self.compiles_layers:
            raise ConfigError(
                f"kernels.activations: got 'recompute@0.5' with kernels.compile_scope {self.compile_scope!r}, expected "
                f"'layers'; it is the compiler that a layer's budget is for"
            )
        check_counts("kernels", self, "linears_min_features")

    @property
    def compiles_layers(self) -> bool:
        """Whether `train.compile` compiles layers as a whole."""
        return self.compile_scope != "dense"
