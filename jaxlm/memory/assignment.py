"""Which buffers a compiled program holds at its peak, read from what XLA writes with xla_dump_to.

Three of those files, all of one module, are joined by the names of instructions:

    *-buffer-assignment.txt    allocations, and the size and offset of each value inside them
    *-live-range.txt           between which two points of the schedule a value is live
    *after_optimizations.txt   the instructions, with the JAX operation that each comes from

All temporaries of a GPU program lie in one allocation, which the runtime takes as a whole: its
size is the memory that the program needs, and the values that are live at the fullest point of the
schedule say what for.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# XLA's number for pinned host memory (xla::Layout::kHostMemorySpace); device memory is 0.
_HOST = 5

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(?:, color (\d+))?, ?(.*)$")
_VALUE = re.compile(
    r"^ value: <\d+ ([^\s{]+)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$"
)
_LIVE = re.compile(r"^    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)
_ARRAY = re.compile(r"^(\w+)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^ +(ROOT )?%([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$")


@dataclass(frozen=True)
class Buffer:
    """A temporary that is live at the peak."""

    # Bytes that no other buffer of the peak counts.
    size: int
    # Element type in XLA's notation, such as bf16; empty for a tuple's table of pointers.
    dtype: str
    # Shape.
    shape: tuple[int, ...]
    # JAX's path of the operation it comes from, such as jit(f)/transpose(jvp())/dot_general.
    operation: str
    # Source file of that operation's innermost line that is not JAX's own; empty if unknown.
    source: str


@dataclass(frozen=True)
class Assignment:
    """Memory of a compiled program, in bytes.

    Without the program's own machine code, and without the workspaces of libraries.
    """

    # Arguments, those that outputs are written into included.
    arguments: int
    # Outputs with memory of their own.
    outputs: int
    # Constants of the program.
    constants: int
    # The allocation of all temporaries.
    temporaries: int
    # Pinned host memory of any kind.
    host: int
    # Temporaries that are live at the peak; together at most `temporaries`, the rest is gaps.
    buffers: tuple[Buffer, ...]

    @property
    def peak(self) -> int:
        """Device memory that the program needs: all allocations, which exist at one time."""
        return self.arguments + self.outputs + self.constants + self.temporaries

    @property
    def gaps(self) -> int:
        """Part of the temporaries' allocation that nothing occupies at the peak."""
        return self.temporaries - sum(buffer.size for buffer in self.buffers)


def read_assignment(directory: Path) -> Assignment:
    """Read the dump of one compilation; see the module's docstring.

    Raises:
        RuntimeError: the directory does not hold the files of exactly one module.
    """
    text = _only(directory, "*-buffer-assignment.txt")
    live = {
        match[1] + match[2]: (int(match[3]), int(match[4]))
        for match in _LIVE.finditer(_only(directory, "*-live-range.txt"))
    }
    program = _Program(_only(directory, "*gpu_after_optimizations.txt"))
    sizes = {"arguments": 0, "outputs": 0, "constants": 0, "temporaries": 0, "host": 0}
    values: list[_Value] = []
    kind, base = "", 0
    for line in text.partition("\nTotal bytes used")[0].splitlines():
        allocation = _ALLOCATION.match(line)
        if allocation is not None:
            kind = _kind(allocation[3], int(allocation[2] or 0))
            if kind == "temporaries":
                base = sizes[kind]  # offsets of several allocations must not meet
            if kind:
                sizes[kind] += int(allocation[1])
            continue
        value = _VALUE.match(line)
        if value is not None and kind == "temporaries":
            name, index = value[1], value[2] or "{}"
            span = live.get(name + index)
            if span is not None:
                where = tuple(int(i) for i in index[1:-1].split(",") if i)
                values.append(
                    _Value(base + int(value[4]), int(value[3]), value[5], name, where, span)
                )
    return Assignment(buffers=tuple(_at_peak(values, program)), **sizes)


def _only(directory: Path, pattern: str) -> str:
    found = sorted(directory.glob(pattern))
    if len(found) != 1:
        raise RuntimeError(f"{directory}: expected one {pattern} of XLA's dump, found {len(found)}")
    return found[0].read_text(encoding="utf-8")


def _kind(description: str, color: int) -> str:
    if color == _HOST:
        return "host"
    if "thread-local" in description:
        return ""  # registers inside a kernel
    for kind, mark in (("arguments", "parameter"), ("constants", "constant")):
        if mark in description:
            return kind
    return "outputs" if "maybe-live-out" in description else "temporaries"


@dataclass(frozen=True)
class _Value:
    offset: int
    size: int
    shape: str
    name: str
    index: tuple[int, ...]
    # First and last point of the schedule at which it is live.
    span: tuple[int, int]


def _at_peak(values: Sequence[_Value], program: "_Program") -> list[Buffer]:
    ordered = sorted(values, key=lambda value: (value.offset, -value.size))

    def live_at(time: int) -> list[_Value]:
        return [value for value in ordered if value.span[0] <= time <= value.span[1]]

    def occupied(live: Sequence[_Value]) -> list[int]:
        """Bytes that each value adds to those before it: values that alias count once."""
        end, sizes = 0, []
        for value in live:
            stop = value.offset + value.size
            sizes.append(max(0, stop - max(value.offset, end)))
            end = max(end, stop)
        return sizes

    starts = {value.span[0] for value in values}
    if not starts:
        return []
    peak = max(sorted(starts), key=lambda time: sum(occupied(live_at(time))))
    live = live_at(peak)
    buffers: list[Buffer] = []
    for value, size in zip(live, occupied(live), strict=True):
        if size == 0:
            continue
        array = _ARRAY.match(value.shape)
        # Values of the same bytes are one buffer: whichever of them has a known origin tells it.
        aliases = [v for v in live if (v.offset, v.size) == (value.offset, value.size)]
        origins = [program.origin(alias.name, alias.index) for alias in aliases]
        operation, frame = next((origin for origin in origins if origin[0]), ("", 0))
        buffers.append(
            Buffer(
                size,
                array[1] if array else "",
                tuple(int(n) for n in array[2].split(",") if n) if array else (),
                operation,
                program.source(frame),
            )
        )
    return buffers


@dataclass
class _Instruction:
    opcode: str
    operands: list[str]
    attributes: str
    # Computation that holds it.
    computation: str
    # JAX's operation and the number of its stack frame; empty and 0 if unknown.
    metadata: tuple[str, int]
    # Instructions that take it as an operand.
    users: list[str] = field(default_factory=list)


class _Program:
    """The instructions of an optimised module in text form."""

    def __init__(self, text: str):
        self._instructions: dict[str, _Instruction] = {}
        self._roots: dict[str, str] = {}
        self._parameters: dict[str, list[str]] = {}
        # Loop of each loop's body.
        self._loops: dict[str, str] = {}
        computation = ""
        for line in text.splitlines():
            header = _COMPUTATION.match(line)
            if header is not None:
                computation = header[1]
                continue
            found = _INSTRUCTION.match(line)
            if found is None:
                continue
            instruction = _parse(found[3], computation)
            self._instructions[found[2]] = instruction
            if found[1]:
                self._roots[computation] = found[2]
            body = _attribute(instruction, "body")
            if body:
                self._loops[body] = found[2]
        for name, instruction in self._instructions.items():
            for operand in instruction.operands:
                if operand in self._instructions:
                    self._instructions[operand].users.append(name)
        self._files = {
            int(number): name for number, name in re.findall(r'^(\d+) "(.*\.py)"$', text, re.M)
        }
        self._locations = _numbers(text, "FileLocations", "file_name_id")
        self._frame_locations = _numbers(text, "StackFrames", "file_location_id")

    def source(self, frame: int) -> str:
        """File of a stack frame; frames of JAX itself are not recorded."""
        return self._files.get(self._locations.get(self._frame_locations.get(frame, 0), 0), "")

    def origin(self, name: str, index: tuple[int, ...]) -> tuple[str, int]:
        """JAX's operation, and its stack frame, that an instruction's result comes from."""
        instruction = self._instructions.get(name)
        if instruction is None:
            return "", 0
        made, used = self._made_by(name, index, 12), self._used_by(name, index)
        # Of zeros, and of a copy, the loop that they enter says more than the place they stand in.
        if instruction.opcode == "copy" or not instruction.operands:
            made, used = used, made
        return made or used or instruction.metadata

    def _made_by(self, name: str, index: tuple[int, ...], depth: int) -> tuple[str, int] | None:
        """Follow a result back through fusions, loops and tuples to an operation with a name."""
        instruction = self._instructions.get(name)
        if instruction is None or depth == 0:
            return None
        opcode, operands = instruction.opcode, instruction.operands
        found = None
        if opcode == "fusion":
            # The fusion's own metadata is that of one of its outputs: ask the one meant.
            found = self._made_by(
                self._roots.get(_attribute(instruction, "calls"), ""), index, depth - 1
            )
        elif opcode == "while":
            found = self._made_by(
                self._roots.get(_attribute(instruction, "body"), ""), index, depth - 1
            )
        elif opcode == "conditional":
            for branch in re.findall(
                r"%([\w.\-]+)", _attribute(instruction, "branch_computations")
            ):
                found = found or self._made_by(self._roots.get(branch, ""), index, depth - 1)
        elif opcode == "tuple" and index and index[0] < len(operands):
            found = self._made_by(operands[index[0]], index[1:], depth - 1)
        elif opcode == "get-tuple-element":
            at = int(_attribute(instruction, "index"))
            found = self._made_by(operands[0], (at, *index), depth - 1)
        elif opcode == "parameter" and instruction.computation in self._loops:
            found = self._made_by(self._loops[instruction.computation], index, depth - 1)
        elif opcode in {"bitcast", "copy", "copy-start", "copy-done"}:
            found = self._made_by(operands[0], index, depth - 1) if operands else None
        return found or (instruction.metadata if instruction.metadata[0] else None)

    def _used_by(self, name: str, index: tuple[int, ...]) -> tuple[str, int] | None:
        """Follow a result to the first operation with a name that takes it.

        The zeros that a loop or a scatter starts from tell nothing of themselves.
        """
        instruction = self._instructions.get(name)
        for user in instruction.users if instruction else ():
            other = self._instructions[user]
            found = None
            if other.opcode == "tuple":
                found = self._used_by(user, (other.operands.index(name), *index))
            elif other.opcode == "while":
                found = self._made_by(user, index, 12)
            elif other.opcode == "get-tuple-element":
                if index and int(_attribute(other, "index")) == index[0]:
                    found = self._used_by(user, index[1:])
            elif other.opcode in {"bitcast", "copy"}:
                found = self._used_by(user, index)
            else:
                found = self._made_by(user, (), 12)
            if found:
                return found
        return None


def _parse(text: str, computation: str) -> _Instruction:
    """Parse what follows `%name = `: SHAPE OPCODE(OPERANDS), ATTRIBUTES."""
    shape_end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    rest = text[shape_end:].lstrip()
    opcode, _, _ = rest.partition("(")
    end = _closing(rest, len(opcode))
    attributes = rest[end + 1 :]
    operation = re.search(r'op_name="([^"]*)"', attributes)
    frame = re.search(r"stack_frame_id=(\d+)", attributes)
    return _Instruction(
        opcode,
        re.findall(r"%([\w.\-]+)", rest[len(opcode) : end]),
        attributes,
        computation,
        (operation[1] if operation else "", int(frame[1]) if frame else 0),
    )


def _closing(text: str, start: int) -> int:
    """Position of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)


def _attribute(instruction: _Instruction, name: str) -> str:
    found = re.search(rf"\b{name}=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", instruction.attributes)
    return (found[1] or found[2]) if found else ""


def _numbers(text: str, section: str, key: str) -> dict[int, int]:
    """One field of a numbered table of the module's header."""
    found = re.search(rf"^{section}\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    return {
        int(number): int(value)
        for number, value in re.findall(
            rf"^(\d+) \{{.*?\b{key}=(\d+)", found[1] if found else "", re.MULTILINE
        )
    }
