# Gradients are Optional and submodules are Tensor | Module to the checker; a wrong one fails the test anyway.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportOptionalSubscript=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
"""Recipes as files, convert and back, the rules, and the registry."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from gemworks.precision import (
    MXLinear,
    PrecisionCostWarning,
    Recipe,
    convert,
    explain,
    fall_back_where_inexact,
    mx_linear,
    quantize,
    recipe,
    revert,
    set_step,
    support_table,
)
from gemworks.precision.backends import choose, device_spec, warn_once
from gemworks.precision.convert import _row_share
from gemworks.precision.recipe import PRESETS, GemmKind
from torch import nn

pytestmark = pytest.mark.reference


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 16), nn.Linear(16, 1)
    )


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_survive_toml(name):
    assert Recipe.from_toml(recipe(name).to_toml()) == recipe(name)


def test_a_recipe_with_everything_survives_a_file(tmp_path):
    full = recipe(
        "mxfp8",
        name='odd "name"',
        scale_mode="floor",
        save="row",
        square_weights=True,
        stochastic_gradients=True,
        hadamard_size=64,
        seed=9,
        keep_last_layers_bf16=2,
        layers={"0": "bf16", "a.b": "fp8_block128"},
    )
    full.save_file(tmp_path / "r.toml")
    assert recipe(tmp_path / "r.toml") == full


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = [", ["not TOML"]),
        ("[other]\n", ["no [recipe] table"]),
        ("[recipe]\nnane = 'x'\n", ["recipe.nane"]),
        ("[recipe]\nsave = 'all'\n", ["save", "all", "high_precision"]),
        ("[recipe.forward]\nkind = 'fp7'\n", ["kind", "fp7", "mxfp8"]),
        ("[recipe.forward]\nkin = 'mxfp8'\n", ["forward", "kin"]),
        ("[recipe.forward]\nleft = 'e2m1'\n", ["left", "storage"]),
        ("[recipe.forward]\nleft = 'e5m2'\nright = 'e5m2'\n", ["both"]),
        ("[recipe]\nhadamard_size = 48\n", ["48", "64"]),
        ("[recipe]\nhadamard_size = 64\nsave = 'both'\n", ["untransformed"]),
        ("[recipe]\nsave = 'both'\n[recipe.wgrad]\nkind = 'bf16'\n", ["one kind"]),
        ("[recipe]\n[layers]\na = 'fp9'\n", ["fp9", "mxfp8"]),
    ],
)
def test_bad_recipe_files_say_what_is_wrong(text, words):
    with pytest.raises(ValueError, match=r".") as error:
        Recipe.from_toml(text)
    for word in words:
        assert word in str(error.value)


def test_unknown_recipes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="fp8_block128"):
        recipe("fp8")
    with pytest.raises(ValueError, match="no file"):
        recipe(tmp_path / "missing.toml")


def test_convert_is_in_place_reversible_and_leaves_the_state_dict():
    net = model()
    before = copy.deepcopy(net.state_dict())
    layers = [m for m in net if isinstance(m, nn.Linear)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(8, 128)
    plain = net(x)
    report = convert(net, "mxfp8")
    assert report.converted == ("0", "2")
    assert [m for m in net if isinstance(m, nn.Linear)] == layers
    assert type(net[0]) is MXLinear
    assert list(net.state_dict()) == list(before)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], net.parameters(), strict=True))
    assert not torch.equal(net(x), plain)
    copied = copy.deepcopy(net)
    assert torch.equal(copied(x), net(x))
    revert(net)
    assert type(net[0]) is nn.Linear
    assert "recipe" not in net[0].__dict__
    assert torch.equal(net(x), plain)
    model().load_state_dict(copied.state_dict(), strict=True)


def test_small_and_odd_layers_stay_bf16_and_say_so():
    """P7: out_features 16 and in_features 16."""
    report = convert(model(), "mxfp8")
    text = str(report)
    assert "out_features 16 is not a multiple of 32" in text
    assert "in_features 16 is not a multiple of 32" in text
    report = convert(model(), recipe("mxfp8", min_features=200))
    assert report.decisions[0].reason.startswith("128 features are fewer than min_features 200")
    assert report.converted == ("2",)


def test_last_layers_filter_and_layer_table():
    assert convert(model(), recipe("mxfp8", keep_last_layers_bf16=3)).converted == ("0",)
    assert convert(model(), recipe("mxfp8", keep_last_layers_bf16=9)).converted == ()
    assert convert(model(), "mxfp8", lambda name, _: name == "2").converted == ("2",)
    report = convert(model(), recipe("mxfp8", layers={"0": "bf16", "2": "fp8_block128"}))
    assert [d.decision for d in report.decisions] == ["bf16", "fp8_block128", "bf16", "bf16"]


def test_recipes_that_name_missing_layers_are_refused():
    with pytest.raises(ValueError, match="does not have") as error:
        convert(model(), recipe("mxfp8", layers={"head": "bf16"}))
    assert "head" in str(error.value)


def test_tied_weights_and_hooks_survive():
    net = nn.ModuleList([nn.Linear(128, 128), nn.Linear(128, 128)])
    net[1].weight = net[0].weight
    calls = []
    net[0].register_forward_hook(lambda *_: calls.append(1))
    convert(net)
    assert net[0].weight is net[1].weight
    net[0](torch.randn(2, 128))
    assert calls == [1]


def test_train_eval_train_needs_no_cached_copy():
    """P11: an evaluation pass between steps changes nothing, under every way of saving."""
    for save in ("high_precision", "row", "both"):
        grads = []
        for evaluate in (False, True):
            net = model()
            convert(net, recipe("mxfp8", save=save, square_weights=True))
            x = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
            for step in range(2):
                net.train()
                net(x).square().mean().backward()
                if evaluate:
                    net.eval()
                    with torch.no_grad():
                        net(x)
                if step == 0:
                    with torch.no_grad():
                        for p in net.parameters():
                            p.sub_(0.1 * p.grad)
            grads.append(net[0].weight.grad.clone())
        assert torch.equal(*grads)


def test_training_follows_bf16():
    losses = {}
    for name in ("bf16", "mxfp8", "mxfp8_regroup128", "fp8_block128"):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
        convert(net, recipe(name))
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
        x = torch.randn(256, 128)
        target = torch.tanh(x @ torch.randn(128, 128) / 11)
        for _ in range(30):
            loss = (net(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[name] = loss.item()
    for name, loss in losses.items():
        assert abs(loss / losses["bf16"] - 1) < 0.02, name


def test_regrouping_falls_back_where_codes_are_lost():
    net = nn.Sequential(nn.Linear(128, 128, bias=False))
    convert(net, "mxfp8_regroup128")
    x = torch.randn(64, 128)
    net(x)
    assert fall_back_where_inexact(net) == []
    x[:, :32] *= 2.0**12
    net(x)
    with pytest.warns(PrecisionCostWarning, match="inexact after regrouping"):
        assert fall_back_where_inexact(net) == ["0"]
    assert torch.equal(net(x), mx_linear(x, net[0].weight))
    assert "fallback=mxfp8" in repr(net)


def test_a_layer_that_falls_back_no_longer_insists_on_cublas():
    """On Hopper cuBLAS has no product of blocks of 32: named as the backend, the next forward would end in an error."""
    for backend, left in (("scaled_mm", "auto"), ("triton", "triton"), ("reference", "reference")):
        net = nn.Sequential(nn.Linear(128, 128, bias=False, device="meta"))  # where no backend is asked what it can
        convert(net, recipe("mxfp8_regroup128", backend=backend, scale_mode="ceil"))
        with pytest.warns(PrecisionCostWarning, match=f"mxfp8 from now on: as {backend} said"):
            net[0].demote("mxfp8", f"as {backend} said")
        assert net[0]._active == recipe("mxfp8", backend=left, scale_mode="ceil")


def test_regrouping_takes_row_weights_where_squares_lose_codes():
    net = nn.Sequential(nn.Linear(128, 128, bias=False))
    with torch.no_grad():
        # 15 binades along any row or column of blocks, which merge exactly; 30 over the square, which do not.
        tile = torch.arange(128) // 32
        net[0].weight.copy_(net[0].weight.sign() * 2.0 ** (-5.0 * (tile[:, None] + tile[None, :])))
    convert(net, recipe("mxfp8_regroup128", max_inexact=0.6))
    x = torch.randn(64, 128)
    net(x)
    assert fall_back_where_inexact(net) == []
    convert(net, recipe("mxfp8_regroup128", max_inexact=0.3))
    net(x)
    with pytest.warns(PrecisionCostWarning, match="1x128 weights"):
        assert fall_back_where_inexact(net) == ["0"]
    torch.testing.assert_close(net(x), mx_linear(x, net[0].weight), rtol=1e-5, atol=1e-5)


def test_row_weights_must_serve_both_directions():
    """15 binades between neighbouring blocks merge exactly along rows or along columns, 30 do not."""
    tile = torch.arange(128) // 32
    exponents = -15.0 * (tile[:, None] % 2) - 2.0 * (tile[None, :] % 2)
    for scale in (exponents, exponents.t(), 2 * exponents, 2 * exponents.t()):
        layer = nn.Linear(128, 128)
        with torch.no_grad():
            layer.weight.copy_(2.0**scale)
        assert (_row_share(layer) > 0) == (scale.min() < -20)


def test_set_step_reaches_every_layer():
    net = model()
    convert(net, recipe("mxfp8", stochastic_gradients=True))
    set_step(net, 7)
    assert (net[0].step, net[2].step) == (7, 7)


def test_support_table_comes_from_the_rules():
    """P5: every device, op and kind has exactly one kernel, and choose() agrees with the table."""
    table = support_table()
    keys = [(device, op, kind) for device, op, kind, _ in table]
    assert len(set(keys)) == len(keys) == 4 * 9
    for device, op, kind, kernel in table:
        spec = device_spec(device) if device == "cpu" or device.startswith("sm_") else None
        choice = choose(op, GemmKind(kind), (4096, 4096, 4096), spec)
        assert kernel == f"{choice.backend}: {choice.kernel}"
    lookup = {key: kernel for *key, kernel in table for key in [tuple(key)]}
    assert lookup["sm_90", "gemm", "fp8_block128"].startswith("scaled_mm: cuBLAS FP8 1x128")
    assert lookup["sm_90", "gemm", "mxfp8"].startswith("triton: Triton dequantise to bf16")
    assert lookup["sm_100", "gemm", "mxfp8"].startswith("scaled_mm: cuBLAS 1x32 E8M0 (written")
    assert lookup["sm_80", "cast", "mxfp8"].startswith("reference")
    assert lookup["cpu", "gemm", "mxfp8_regroup128"].startswith("reference")


def test_explain_names_kernel_reason_and_cost():
    text = str(explain((4096, 1024, 1024), "mxfp8", "sm_90"))
    assert "1x32 scales need sm_100" in text
    assert "exact, but slower than plain bf16" in text
    assert "stays bf16: in_features 16 is not a multiple of 32" in str(explain((4096, 16, 1024), "mxfp8", "sm_90"))
    assert "emulated in bf16" in str(explain((4096, 1024, 1024), "fp8_block128", "sm_100"))
    assert "scaled_mm" in str(explain((70, 1024, 1024), "fp8_block128", "sm_90"))


@pytest.mark.parametrize(
    ("name", "num_ranks", "line"),
    [
        ("mxfp8", 8, "FSDP2 over 8 ranks gathers the weight as square: 128 rows a rank are a multiple of 32"),
        ("mxfp8", 64, "as row: 16 rows a rank are not a multiple of 32: 1x32 along K, requantised for dgrad"),
        ("fp8_block128", 16, "as bf16: 64 rows a rank are not a multiple of 128: squares would cross ranks"),
        ("fp8_block128", 3, "as bf16: 1024 rows do not divide by 3 ranks"),
        ("bf16", 8, "as bf16: forward is not quantised"),
    ],
)
def test_explain_shows_the_rule_of_the_gather(name, num_ranks, line):
    """Without a number of ranks nothing is said of gathers."""
    assert line in str(explain((4096, 512, 1024), name, "sm_90", num_ranks))
    assert "FSDP2" not in str(explain((4096, 512, 1024), name, "sm_90"))
    with pytest.raises(ValueError, match="num_ranks: got 0"):
        explain((4096, 512, 1024), name, "sm_90", 0)


def test_named_backends_are_used_or_refused():
    with pytest.raises(ValueError, match="'cuda', 'cuda:N'"):
        device_spec("tpu")
    with pytest.raises(ValueError, match="expected 'auto'"):
        choose("gemm", GemmKind.MXFP8, (64, 64, 64), device_spec("sm_90"), "cutlass")
    with pytest.raises(ValueError, match="cuBLAS refuses"):
        choose("gemm", GemmKind.MXFP8, (64, 64, 64), device_spec("sm_90"), "scaled_mm")
    with pytest.raises(ValueError, match="needs a CUDA device"):
        convert(model(), recipe("mxfp8", backend="scaled_mm"))


def test_costs_are_warned_about_once():
    with pytest.warns(PrecisionCostWarning, match="only once please"):
        warn_once("only once please")
    warn_once("only once please")


def test_import_is_light_and_needs_no_gpu():
    """P4: importing pulls in no Triton, probes no device, and works anywhere."""
    code = (
        "import sys, torch; import gemworks.precision; "
        "assert 'triton' not in sys.modules, 'triton imported'; assert not torch.cuda.is_initialized()"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=environment, timeout=120)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"recipe: got changes savee, expected some of .*save"):
        recipe("mxfp8", savee="both")
    with pytest.raises(ValueError, match=r"shape: got \(3, 4\), expected \(M, K, N\)"):
        explain((3, 4), "mxfp8", "sm_90")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="x: got list, expected a Tensor"):
        quantize([1.0])  # pyright: ignore[reportArgumentType]
