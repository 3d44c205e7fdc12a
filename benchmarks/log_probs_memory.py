"""Peak memory and CPU time of log-probs with their gradients, from whole logits and in parts.

    python benchmarks/log_probs_memory.py                                         prints the table of docs/figures.md
    python benchmarks/log_probs_memory.py --tokens 1024 2048 --figure FILE.png    also draws it

Float32, a vocabulary of 150,000, hidden size 64, one thread. Every cell is a process of its own; the two ways
alternate. Memory is the peak of the resident memory (VmHWM) above that before the forward pass. It holds the gradients
of the weight (37 MiB) and of the states. Whole logits run as far as 4 GiB suffice; beyond, their memory and time are
those of the largest run times the tokens, and marked.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
HIDDEN, VOCAB = 64, 150_000
LIMIT_MIB = 3584
TIME_LIMIT_S = 3000
TOKENS = (1024, 2048, 4096, 8192, 16384, 65536)
REPEATED_UP_TO = 2048  # tokens; larger runs are made once
WAYS = ("whole", "parts")


def resident(field: str) -> float:
    """Return this process's resident memory (VmRSS) or its peak (VmHWM), MiB."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) / 1024


def run(way: str, tokens: int) -> dict[str, float]:
    """Return the peak in MiB and the CPU seconds of one forward and backward pass in this process."""
    import torch

    from hybridrl.algos.token_stats import token_stats, token_stats_of_states

    torch.set_num_threads(1)
    torch.manual_seed(0)

    def once(num: int) -> None:
        states_NH = torch.randn(num, HIDDEN, requires_grad=True)
        labels_N = torch.randint(VOCAB, (num,))
        if way == "whole":
            found = token_stats(states_NH @ weight_VH.t(), labels_N)
        else:
            found = token_stats_of_states(states_NH, weight_VH, labels_N)
        torch.autograd.grad(found.log_probs_N.sum(), (states_NH, weight_VH))

    weight_VH = (torch.randn(VOCAB, HIDDEN) * 0.1).requires_grad_()
    once(8)  # loads what is loaded at first use
    before, start = resident("VmRSS"), time.process_time()
    Path("/proc/self/clear_refs").write_text("5")
    once(tokens)
    return {"mib": resident("VmHWM") - before, "cpu_s": time.process_time() - start}


def in_a_process(way: str, tokens: int) -> dict[str, float]:
    """Return what `run` returns in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--run", way, str(tokens)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIME_LIMIT_S,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def whole_mib(tokens: int) -> float:
    """Return the MiB that logits and their gradient take."""
    return tokens * VOCAB * 2 * 4 / 2**20


def compare(sizes: list[int], repeats: int) -> dict[str, dict[int, tuple[float, float, float, bool]]]:
    """Return (MiB, median of CPU seconds, largest less smallest, whether extrapolated) by way and tokens."""
    found: dict[str, dict[int, tuple[float, float, float, bool]]] = {way: {} for way in WAYS}
    for tokens in sizes:
        ways = [way for way in WAYS if way == "parts" or whole_mib(tokens) < LIMIT_MIB]
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(repeats if tokens <= REPEATED_UP_TO else 1):
            for way in ways:
                runs[way].append(in_a_process(way, tokens))
        for way in ways:
            seconds = [each["cpu_s"] for each in runs[way]]
            mib = max(each["mib"] for each in runs[way])
            found[way][tokens] = (mib, statistics.median(seconds), max(seconds) - min(seconds), False)
        if "whole" not in ways:
            largest = max(size for size, cell in found["whole"].items() if not cell[3])
            mib, seconds_, spread, _ = found["whole"][largest]
            found["whole"][tokens] = (mib * tokens / largest, seconds_ * tokens / largest, spread, True)
        print(row(tokens, found), flush=True)
    return found


def row(tokens: int, found: dict[str, dict[int, tuple[float, float, float, bool]]]) -> str:
    """Return a row of the table."""
    cells = []
    for number, digits in ((0, 0), (1, 1)):
        for way in WAYS:
            cell = found[way][tokens]
            spread = f" ± {cell[2] / 2:.1f}" if number == 1 and cell[2] else ""
            cells.append(("*" if cell[3] else "") + f"{cell[number]:,.{digits}f}" + spread + ("*" if cell[3] else ""))
    return f"| {tokens:,} | {' | '.join(cells)} |"


def draw(found: dict[str, dict[int, tuple[float, float, float, bool]]], path: str) -> None:
    """Draw memory over tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6))
    for way, label, color in (("whole", "whole logits", "tab:red"), ("parts", "in parts", "tab:blue")):
        cells = found[way]
        for extrapolated, style in ((False, "o-"), (True, "o:")):
            points = sorted(tokens for tokens, cell in cells.items() if cell[3] == extrapolated)
            if extrapolated and points:  # joined to the last measured point
                points = [max(tokens for tokens, cell in cells.items() if not cell[3]), *points]
            name = f"{label}, extrapolated" if extrapolated else label
            if points:
                face = "white" if extrapolated else color
                mib = [cells[tokens][0] for tokens in points]
                above = 3 - extrapolated  # measured points cover the point where the extrapolation begins
                axes.plot(points, mib, style, color=color, label=name, markerfacecolor=face, markersize=4, zorder=above)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="peak memory, MiB")
    axes.set_xticks(sorted(found["parts"]), [f"{tokens // 1024}k" for tokens in sorted(found["parts"])])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--figure", metavar="FILE")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.run:
        print(json.dumps(run(chosen.run[0], int(chosen.run[1]))))
        return 0
    print("| tokens | whole: MiB | parts: MiB | whole: CPU s | parts: CPU s |\n|---|---|---|---|---|", flush=True)
    found = compare(chosen.tokens, chosen.repeats)
    if chosen.figure:
        draw(found, chosen.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
