"""The text of a PTX file, as Triton's compiler writes it, into basic blocks of instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

WIDTHS = {"p": 1, "rs": 16, "r": 32, "rd": 64}  # bits of a register, by its name without the number
ENDS_A_BLOCK = ("bra", "bra.uni", "ret", "bar.sync", "bar.warp.sync")


class Register(NamedTuple):
    name: str
    width: int


class Address(NamedTuple):
    base: Register | str  # or a parameter, or shared memory
    offset: int


class Name(NamedTuple):
    """A label, a special register, or shared memory."""

    text: str


@dataclass
class Instruction:
    opcode: str
    operands: list[Any]  # registers, addresses, names, lists of them, and ints for the bits of constants
    guard: tuple[str, bool] | None  # a predicate, and whether it has to be false
    text: str
    line: str  # of the Python source

    def __str__(self) -> str:
        return f"{self.line}: {self.text}"


@dataclass
class Program:
    name: str
    threads: int
    parameters: list[tuple[str, int]]  # names and bytes
    blocks: list[list[Instruction]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def parsed(text: str) -> Program:
    entry = re.search(r"\.visible \.entry (\w+)\((.*?)\)(.*?)\n\{(.*)\n\}", text, re.S)
    if entry is None:
        raise ValueError("the PTX should have one entry")
    name, parameters, directives, body = entry.groups()
    threads = re.search(r"\.reqntid (\d+)", directives)
    sizes = {".u64": 8, ".u32": 4}
    words = [parameter.split() for parameter in parameters.split(",") if parameter.strip()]
    program = Program(name, int(threads[1]) if threads else 0, [(w[-1], sizes[w[1]]) for w in words])
    block: list[Instruction] = []
    for statement, line in _statements(body, text):
        if statement.endswith(":"):
            _close(program, block)
            block = []
            program.labels[statement[:-1]] = len(program.blocks)
            continue
        block.append(_instruction(statement, line))
        if block[-1].opcode in ENDS_A_BLOCK:
            _close(program, block)
            block = []
    _close(program, block)
    return program


def _close(program: Program, block: list[Instruction]) -> None:
    if block:
        program.blocks.append(block)


def _statements(body: str, text: str) -> list[tuple[str, str]]:
    """Each with the line of the Python source that it is from."""
    files = {number: path.rpartition("/")[2] for number, path in re.findall(r'\.file\s+(\d+) "([^"]+)"', text)}
    found, place = [], "?"
    for line in body.split("\n"):
        code = line.split("//")[0].strip()
        if code.startswith(".loc"):
            _, number, at, *_ = code.split()
            place = f"{files.get(number, number)}:{at}"
        elif code.endswith(":"):
            found.append((code, place))
        elif not code.startswith("."):
            found += [(part.strip(), place) for part in code.split(";") if part.strip()]
    return found


def _instruction(statement: str, line: str) -> Instruction:
    match = re.fullmatch(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)", statement, re.S)
    if match is None:
        raise ValueError(f"not an instruction: {statement!r}")
    negated, predicate, opcode, rest = match.groups()
    operands = [_operand(part) for part in _split(rest)]
    return Instruction(opcode, operands, (predicate, bool(negated)) if predicate else None, statement, line)


def _split(text: str) -> list[str]:
    """Splits at commas outside brackets."""
    return [part.strip() for part in re.findall(r"\s*(?:\{[^}]*\}|\[[^\]]*\]|[^,]+)", text) if part.strip()]


def _operand(text: str) -> Any:
    if text[0] == "{":
        return [_operand(part) for part in _split(text[1:-1])]
    if "|" in text:
        return [_operand(part) for part in text.split("|")]
    if text[0] == "[":
        base, offset = re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+)\s*)?\]", text).groups()  # type: ignore[union-attr]
        return Address(_operand(base) if base[0] == "%" else base, int(offset or 0))
    if (register := re.fullmatch(r"%([a-z]+)\d+", text)) and register[1] in WIDTHS:
        return Register(text, WIDTHS[register[1]])
    if text[:2] == "0f":
        return int(text[2:], 16)
    if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", text):
        return int(text.rstrip("U"), 0)
    return Name(text)
