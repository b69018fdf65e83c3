"""Command line of the overlap report."""

from __future__ import annotations

import argparse
import sys

from gemworks.netmem.overlap import overlap_report, plot_timeline, rank_waits, read_trace


def main(argv: list[str] | None = None) -> int:
    """Print the report of one or more traces; with several, also who waited for whom across ranks."""
    parser = argparse.ArgumentParser(prog="python -m gemworks.netmem.overlap", description=main.__doc__)
    parser.add_argument("traces", nargs="+", help="files that torch.profiler exported, .json or .json.gz")
    parser.add_argument("--json", help="write the first trace's report here")
    parser.add_argument("--png", help="write the first trace's timeline here")
    args = parser.parse_args(argv)
    try:
        traces = [read_trace(path) for path in args.traces]
        for trace in traces:
            print(overlap_report(trace).to_text())
        if len(traces) > 1:
            print(rank_waits(traces).to_text())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        overlap_report(traces[0]).to_json(args.json)
    if args.png:
        plot_timeline(traces[0], args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
