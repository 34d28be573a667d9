"""Compiles the GPU kernels for real GPUs, without one, and prints what each takes: registers, spills, shared memory.

What is compiled is what would be launched: layers of these sizes are stepped on the meta device, where launches are
observed and not made, and Triton's compiler gets their arguments. Nothing is run.

Run: make gpu-resources, or python benchmarks/gpu_resources.py [--sizes 64 …] [--targets sm_80 …] [--write]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasth import _files
from fasth.nn.recurrence import NONLINEARITIES
from fasth.reflections.plan import COMPACT, FORMS, SAVE_T, TRITON, Plan
from fasth.reflections.triton.configurations import FUSE, LARGEST_STATE
from fasth.reflections.triton.launching import on_hip

FILE = Path(__file__).parent / "gpu" / "resources.md"
SIZES = (64, 100, 128, 256, 400, 512, 1000, 1024, 2048)  # some of them no multiples of 16
TARGETS = {
    "sm_75": ("cuda", 75, 32),
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "gfx942": ("hip", "gfx942", 64),
}
# The most shared memory of one program, in bytes, by CUDA's and CDNA 3's documentation.
SHARED_MEMORY = {"sm_75": 64 << 10, "sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Launch:
    """A kernel with what its code depends on: types of arguments, which are multiples of 16, and constants."""

    kernel: str
    warps: int
    most_registers: int | None
    signature: tuple[tuple[str, str], ...]
    divisible: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]

    @property
    def size(self) -> str:
        constants = dict(self.constants)
        if self.kernel == "sweep":
            return f"{constants['D']} columns"
        return f"{constants.get('BD') or constants['TILE']} columns at a time"

    @property
    def flags(self) -> str:
        names = ("LAST_FIRST", "TRANSPOSE", "RECORD", "SCALED", "HAS_BIAS", "SHARED", "OF_IDENTITY")
        constants = dict(self.constants)
        form = FORMS[constants["FORM"]] if "FORM" in constants else ""
        precision = constants.get("PRECISION", "")
        said = [form, precision, *(name.lower().replace("_", " ") for name in names if constants.get(name))]
        return ", ".join(word for word in said if word)


@dataclass(frozen=True)
class Resources:
    registers: int
    spills: int  # bytes
    shared: int  # bytes


def launches(
    sizes: Iterable[int], dtypes: Iterable[str] = ("float32",), precisions: Iterable[str] = ("ieee", "tf32")
) -> list[Launch]:
    """All that a training step launches, of a matrix of every form, of a LinearSVD and of a recurrence: each once.

    The gradient with products of all these precisions.
    """
    from fasth.reflections.triton import launching

    found: dict[Launch, None] = {}

    def observe(kernel: Any, options: dict[str, int], arguments: dict[str, Any]) -> None:
        for precision in precisions if "PRECISION" in arguments else [""]:
            found[_launch(kernel, options, {**arguments, "PRECISION": precision})] = None

    launching.observers.append(observe)
    try:
        for d in sizes:
            for name in dtypes:
                _step(d, getattr(torch, name))
    finally:
        launching.observers.remove(observe)
    return list(found)


def _step(d: int, dtype: torch.dtype) -> None:
    from fasth.reflections.triton import launch

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, V, vector = empty(32, d), empty(d, d), empty(d)
    for form in range(len(FORMS)):
        plan = Plan(TRITON, form, save=SAVE_T, copy_output=True)
        for transpose in (False, True):
            of_Q = plan._replace(transpose=transpose)
            _, *saved = launch.householder(x, V, of_Q)
            launch.householder_backward(x, None, V, saved, [True, True], of_Q)
        launch.householder(x, V, plan._replace(of_identity=True, copy_output=False))
        for V_side in (None, empty(d, d)) if form == COMPACT else (empty(d, d),):
            _, *saved = launch.svd_linear(x, V, vector, V_side, vector, plan)
            launch.svd_linear_backward(x, None, V, vector, V_side, saved, [True] * 5, plan)
    if d <= LARGEST_STATE:
        states = empty(5, 32, d)
        for f in range(len(NONLINEARITIES)):
            launch.recurrence(states, None, V, x, vector, f, False)
            launch.recurrence_backward(states, None, V, states, x, f, False, True, False)


def _launch(kernel: Any, options: dict[str, int], arguments: dict[str, Any]) -> Launch:
    """Specializes arguments as Triton does: None, 1 and parameters that the kernel declares constexpr are constants."""
    declared = {p.name: p for p in kernel.params}
    types, divisible, constants = {}, [], {}
    for name in kernel.arg_names:
        value, parameter = arguments[name], declared[name]
        if isinstance(value, Tensor):
            types[name] = "*" + DTYPES[str(value.dtype).removeprefix("torch.")]
            divisible.append(name)
        elif parameter.is_constexpr or value is None or (value == 1 and not parameter.do_not_specialize):
            types[name] = "constexpr"
            constants[name] = value
        else:
            types[name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                divisible.append(name)
    warps, most = options["num_warps"], options.get("maxnreg")
    return Launch(kernel.__name__, warps, most, tuple(types.items()), tuple(divisible), tuple(constants.items()))


def _compile(launch: Launch, target: str) -> Any:
    """Compiles the launch with Triton's compiler, which needs no device."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fasth.reflections.triton import kernels, recurrence_kernels

    kernel = getattr(recurrence_kernels if "recurrence" in launch.kernel else kernels, launch.kernel)
    place = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel,
        signature=dict(launch.signature),
        constexprs={place[name]: value for name, value in launch.constants},
        attrs={place[name]: [["tt.divisibility", 16]] for name in launch.divisible},
    )
    options = {"num_warps": launch.warps}
    if launch.most_registers:
        options["maxnreg"] = launch.most_registers
    if TARGETS[target][0] == "hip":
        options = on_hip(options)
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options | {"enable_fp_fusion": FUSE})


def assembly(launch: Launch, target: str) -> str:
    """The code for one GPU: PTX, or AMD's."""
    return _compile(launch, target).asm["amdgcn" if TARGETS[target][0] == "hip" else "ptx"]


def resources(launch: Launch, target: str) -> Resources:
    """The kernel's resources as reported by the compiler, and for NVIDIA's GPUs by the assembler that comes with it."""
    compiled = _compile(launch, target)
    if TARGETS[target][0] == "hip":
        text = compiled.asm["amdgcn"]
        # Scalar registers spill to lanes of vector registers, and not to memory: that is the private segment.
        spills = _number(text, r"\.private_segment_fixed_size:\s+(\d+)")
        return Resources(_number(text, r"\.vgpr_count:\s+(\d+)"), spills, compiled.metadata.shared)
    report = _assemble(compiled.asm["ptx"], target)
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", report)))
    return Resources(_number(report, r"Used (\d+) registers"), spills, compiled.metadata.shared)


def _assemble(ptx: str, target: str) -> str:
    """The report of ptxas for one GPU. Triton ships two versions of ptxas and picks one."""
    from triton.backends.nvidia.compiler import get_ptxas

    architecture = f"{target}a" if target == "sm_90" else target
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        ptxas = get_ptxas(TARGETS[target][1]).path
        command = [ptxas, "-v", f"--gpu-name={architecture}", str(source), "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stderr + done.stdout


def _number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the compiler's report should have {pattern}; got {text[:200]!r}")
    return int(found[1])


def _compiled(job: tuple[Launch, str]) -> tuple[Launch, str, Resources]:
    return *job, resources(*job)


def all_resources(jobs: list[tuple[Launch, str]]) -> Iterator[tuple[Launch, str, Resources]]:
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(_compiled, jobs)


def _most(taken: list[Resources]) -> str:
    registers, spills, shared = (max(r) for r in zip(*((t.registers, t.spills, t.shared) for t in taken), strict=True))
    return f"{registers} / {spills} / {shared / 1024:.1f}"


def table(found: list[tuple[Launch, str, Resources]]) -> str:
    """The most that any version of a kernel takes, by its size and warps, on each GPU."""
    targets = list(dict.fromkeys(target for _, target, _ in found))
    rows: dict[tuple[str, str, int], dict[str, list[Resources]]] = {}
    for one, target, taken in found:
        rows.setdefault((one.kernel, one.size, one.warps), {}).setdefault(target, []).append(taken)
    lines = [f"| kernel | size | warps | {' | '.join(targets)} |", "| --- | --- | ---: |" + " ---: |" * len(targets)]
    for (kernel, size, warps), by_target in rows.items():
        cells = [_most(by_target[target]) for target in targets]
        lines.append(f"| `{kernel}` | {size} | {warps} | {' | '.join(cells)} |")
    bad = [one for one, target, r in found if r.spills or r.shared > SHARED_MEMORY[target]]
    return "\n".join([*lines, "", f"{len(found)} versions compiled, {len(bad)} with spills or too much shared memory."])


def main() -> int:
    import triton

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--write", action="store_true", help="the table, for docs/gpu.md")
    options = parser.parse_args()
    jobs = [(one, target) for one in launches(options.sizes, options.dtypes) for target in options.targets]
    found = []
    for i, (one, target, taken) in enumerate(all_resources(jobs), 1):
        found.append((one, target, taken))
        fits = not taken.spills and taken.shared <= SHARED_MEMORY[target]
        if not fits or i % 50 == 0 or i == len(jobs):
            print(f"{i}/{len(jobs)} {target} {one.kernel}, {one.size}, {one.warps} warps, {one.flags}: {taken}"
                  f"{'' if fits else '  DOES NOT FIT'}", file=sys.stderr, flush=True)  # fmt: skip
    text = f"{table(found)} By `make gpu-resources`, with Triton {triton.__version__}; nothing was run."
    print(text)
    if options.write:
        _files.write(FILE, text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
