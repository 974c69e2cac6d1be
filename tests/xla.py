"""How XLA compiles in tests, whose time is nearly all compilation of programs that run once, and what it made."""

import math
import re
from importlib.metadata import version
from typing import NamedTuple


def flags(devices: int) -> str:
    """XLA_FLAGS for that many CPU devices."""
    found = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    if version("jaxlib").startswith("0.10."):
        # compiles in less than half of the time; jaxlib 0.11 has no other way and ends at a flag that it does not know
        found += " --xla_cpu_use_fusion_emitters=false"
    return found


class Launch(NamedTuple):
    """A kernel of a compiled program: what it is, where in the model, and the bytes of its result."""

    name: str
    operation: str
    scope: str
    written: int


WITHOUT_KERNEL = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all while conditional call".split()
)
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w\-]+)\(")
BYTES = {"pred": 1, "s8": 1, "s16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}


def launches(text: str) -> list[Launch]:
    """The kernels of the body of the only loop of a program compiled for a GPU (`Compiled.as_text`), in order."""
    (body,) = set(re.findall(r" while\(.*body=%?([\w.\-]+)", text))
    found = []
    for line in text.split(f"\n%{body} (")[1].split("\n}\n")[0].splitlines()[1:]:
        # comments between brackets number the elements of tuples
        match = INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line))
        if match is None or match[3] in WITHOUT_KERNEL:
            continue
        scope = re.search(r'op_name="([^"]*)"', line)
        written = sum(
            BYTES[dtype] * math.prod(int(n) for n in shape.split(",") if n)
            for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", match[2])
        )
        found.append(Launch(match[1], match[3], scope[1] if scope else "", written))
    return found
