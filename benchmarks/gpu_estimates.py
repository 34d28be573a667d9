"""Prints what the cost model estimates for three GPUs, and what it chooses. Estimates: nothing was measured.

Run: python benchmarks/gpu_estimates.py [--write]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fasth import files
from fasth.reflections import gpu_model as model
from fasth.reflections.plan import block_size_by_rule

FILE = Path(__file__).parent / "gpu" / "estimates.md"
SIZES = (64, 256, 512, 768, 1024, 2048)
ROWS = (32, 128, 512, 1024, 4096)


def estimates(gpu: model.GPU, rows: int, d: int, triangular: bool) -> dict[str, float]:
    """Seconds of a training step of one orthogonal matrix, by algorithm."""
    k = block_size_by_rule(d, False)
    return {
        "kernels": model.kernels(gpu, rows, d, d, triangular),
        "blocks": model.blocks(gpu, rows, d, d, triangular, k),
        "forming": model.applying(gpu, d, d, d, triangular, k) + model.multiplying(gpu, rows, d, d),
        "tiles": model.tiles(gpu, rows, d, d, triangular),
    }


def table(gpu: model.GPU) -> str:
    """For triangular and compact reflectors: the algorithm that is chosen and its time, and that of tiles."""
    lines = [
        f"**{gpu.name}: µs of a training step, estimated**",
        "",
        f"| d | {' | '.join(f'{rows} rows' for rows in ROWS)} | kernels to | Q formed above |",
        "| --- |" + " ---: |" * (len(ROWS) + 2),
    ]
    for d in SIZES:
        k = block_size_by_rule(d, False)
        limits = model.kernel_rows(gpu, d, d, True, k), model.forming_rows(gpu, d, d, True, k)
        cells = [_cell(estimates(gpu, rows, d, True)) for rows in ROWS]
        lines.append(f"| {d} | {' | '.join(cells)} | {limits[0]} rows | {limits[1]} rows |")
    return "\n".join(lines)


def _cell(of: dict[str, float]) -> str:
    best = min(("kernels", "blocks", "forming"), key=lambda name: of[name])
    return f"{best} {of[best] * 1e6:.0f} ({of['tiles'] * 1e6:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="the tables, for docs/gpu.md")
    options = parser.parse_args()
    text = "\n\n".join(map(table, model.GPUS))
    print(text)
    if options.write:
        files.write(FILE, text + "\n")


if __name__ == "__main__":
    main()
