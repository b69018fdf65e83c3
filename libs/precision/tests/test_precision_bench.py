"""The benchmark runs on a CPU at toy sizes, writes the agreed columns, and does not time what fails its check."""

import csv

import pytest
import torch
from gemworks.precision import bench, bench_checks, bench_host, bench_linear, bench_run, linear, short_casts

pytestmark = pytest.mark.reference


def skip_slow_checks(monkeypatch, *kept):
    """On a CPU they compare the reference with itself, for minutes."""
    for name in set(bench_checks.CHECKS) - set(kept):
        monkeypatch.setitem(bench_checks.CHECKS, name, lambda device: None)


def test_smoke_run_writes_the_agreed_columns(tmp_path, monkeypatch):
    skip_slow_checks(monkeypatch, "cast:contract", "gemm:exact", "activation")
    assert bench.main(["--out", str(tmp_path)]) == 0
    with (tmp_path / "precision_cpu_smoke.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [*bench_run.LEADING, *bench_run.COMMON]
    assert {r["op"] for r in rows} >= {
        "cast_rows",
        "cast_both",
        "cast_square",
        "norm_cast",
        "gelu_cast",
        "linear",
        "norm_linear",
        "gemm_wgrad",
    }
    plain = [r for r in rows if r["op"] == "linear" and r["format"] == "bf16"]
    assert all(float(r["ratio_to_bf16"]) == 1.0 for r in plain)
    assert all(float(r["ms"]) > 0 and r["copy_gbps"] and r["gpu"] == "cpu" for r in rows)


def test_what_fails_its_check_is_not_timed(tmp_path, monkeypatch, capsys):
    def broken(device):
        raise AssertionError("3 codes differ")

    skip_slow_checks(monkeypatch)
    monkeypatch.setitem(bench_checks.CHECKS, "norm", broken)
    assert bench.main(["--out", str(tmp_path), "--only", "checks,casts,norms"]) == 1
    text = capsys.readouterr().out
    assert "CHECK FAILED norm: AssertionError: 3 codes differ" in text
    assert "not timed: norms" in text
    assert "op=norm_cast" not in text
    assert "op=cast_rows" in text


def test_host_time_without_a_gpu_is_of_the_short_ways_and_leaves_nothing_behind(tmp_path, monkeypatch):
    """The Python of sm_90's layers on CPU tensors: no reference arithmetic runs, and none is replaced afterwards."""
    monkeypatch.setattr(bench_run, "commit", lambda: "none")
    run = bench_run.Bench(torch.device("cpu"), smoke=True)
    with monkeypatch.context() as inside:
        inside.setattr(linear._EagerLinear, "apply", None)
        bench_host.bench_host(run)
    assert {row["op"] for row in run.rows} == {"linear_host_python"}
    assert len(run.rows) == 1 + len(bench_linear.variants())
    assert all(0 < row["ms"] < 50 for row in run.rows)
    assert not any(key for launcher in short_casts.launchers() for key in launcher.compiled)
    x, w = torch.randn(8, 128).bfloat16(), torch.randn(128, 128).bfloat16()
    assert torch.equal(torch.mm(x, w), x @ w)
    assert linear.mx_linear(x, w, None, "fp8_block128").isfinite().all()


def test_a_compiled_peer_starts_no_workers(monkeypatch):
    """Inductor's pool would have one a processor, and the benchmark would wait for them when it ends."""
    from torch._inductor import config
    from torch._inductor.async_compile import get_compile_threads

    monkeypatch.setattr(config, "compile_threads", 4)
    assert callable(bench_run.compiled(torch.sin))
    assert get_compile_threads() == 1


def test_turns_are_bursts_as_long_as_asked_and_clocks_are_read_in_them(monkeypatch):
    """On a clock of our own: the first replay takes a second, as the upload of a graph does; later ones 1 and 4 ms."""
    now, log, lowered = [0.0], list[int](), [1980]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = -1.0

        def record(self) -> None:
            self.at = now[0]

        def synchronize(self) -> None:
            assert self.at >= 0
            lowered[0] = 1500 + log[-1]

        def elapsed_time(self, later: "Event") -> float:
            return 1e3 * (later.at - self.at)

    def replay(which: int, seconds: float) -> None:
        now[0] += 1.0 if which not in log else seconds
        log.append(which)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench_run.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(bench_run, "clock_mhz", lambda device: lowered[0])
    run = bench_run.Bench(torch.device("cuda"), smoke=True)
    times = run.time_in_turns([lambda: replay(1, 1e-3), lambda: replay(2, 4e-3)], [0.4, 0.0], num_turns=2)
    assert torch.tensor(times).allclose(torch.tensor([[1.0] * 3, [4.0] * 3]))
    turn = [1] * 2 * 200 + [2] * 2 * 5  # the half of each untimed
    assert log == [1, 1, 2, 2, *turn, *turn]
    assert run.clocks == {0: 1501, 1: 1502}
