"""Compiles all kernels of the workspace by NVRTC, as the program does, for each architecture that
is held to, and compares registers, shared memory and spills with a table.

    check.py LIBNVRTC ROOT TABLE [--write]

No kernel may spill or keep local memory, on any architecture. Registers and shared memory are to be
those of the table, which --write writes anew.
"""

import ctypes
import pathlib
import re
import sys

ARCHITECTURES = (80, 90, 100)


def options(root):
    """The options of device/src/cuda/compile.rs."""
    text = (root / "device/src/cuda/compile.rs").read_text()
    listed = re.search(r"const OPTIONS[^=]*=\s*\[(.*?)\];", text, re.DOTALL).group(1)
    return re.findall(r'"([^"]+)"', listed)


def compile_log(nvrtc, source, headers, flags):
    """What NVRTC says of a source, with the assembler's resource usage."""
    program = ctypes.c_void_p()
    names = [header.name.encode() for header in headers]
    texts = [header.read_bytes() for header in headers]
    strings = lambda values: (ctypes.c_char_p * len(values))(*values)
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.read_bytes(), source.name.encode(), len(texts), strings(texts),
        strings(names))
    flags = [flag.encode() for flag in flags]
    result = nvrtc.nvrtcCompileProgram(program, len(flags), strings(flags))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if result != 0:
        sys.exit(f"{source}: NVRTC error {result}\n{log.value.decode()}")
    return log.value.decode()


def usage(log):
    """Of each kernel in a log: registers, shared memory in bytes, and local memory in bytes."""
    found = {}
    for part in log.split("Compiling entry function ")[1:]:
        number = lambda pattern: sum(int(n) for n in re.findall(pattern, part))
        local = number(r"(\d+) bytes (?:stack frame|spill stores|spill loads)")
        found[part.split("'")[1]] = (
            number(r"Used (\d+) registers"), number(r"(\d+) bytes smem"), local)
    return found


def main(library, root, table, write):
    root, table = pathlib.Path(root), pathlib.Path(table)
    nvrtc = ctypes.CDLL(library)
    lines, faults = [], []
    for source in sorted(root.glob("*/kernels/*.cu")):
        headers = sorted({*root.glob("device/kernels/*.cuh"), *source.parent.glob("*.cuh")})
        by_architecture = []
        for architecture in ARCHITECTURES:
            flags = [*options(root), f"--gpu-architecture=sm_{architecture}", "--ptxas-options=-v"]
            by_architecture.append(usage(compile_log(nvrtc, source, headers, flags)))
        if not by_architecture[0]:
            faults.append(f"{source}: no kernels in it")
        for kernel in by_architecture[0]:
            measured = [kernels[kernel] for kernels in by_architecture]
            name = f"{source.parent.parent.name}/{source.stem} {kernel}"
            for architecture, (_, _, local) in zip(ARCHITECTURES, measured):
                if local:
                    faults.append(f"{name}: {local} bytes of local memory on sm_{architecture}")
            registers = " ".join(str(registers) for registers, _, _ in measured)
            lines.append(f"{name} {registers} {max(shared for _, shared, _ in measured)}")
    head = ["# crate/file, kernel, registers a thread for " +
            ", ".join(f"sm_{architecture}" for architecture in ARCHITECTURES) +
            ", bytes of static shared memory a block"]
    lines = head + sorted(lines)
    if write:
        table.write_text("\n".join(lines) + "\n")
    held = table.read_text().splitlines()
    faults += [f"not in the table:  {line}" for line in lines if line not in held]
    faults += [f"only in the table: {line}" for line in held if line not in lines]
    if faults:
        again = "look at what changed, then run tests/nvrtc.sh --write"
        sys.exit("\n".join(faults) + f"\n{table}: {again}")
    print(f"{len(lines) - 1} kernels compile to {', '.join(f'sm_{a}' for a in ARCHITECTURES)}, "
          "without spills and with the table's registers")


if __name__ == "__main__":
    main(*sys.argv[1:4], "--write" in sys.argv[4:])
