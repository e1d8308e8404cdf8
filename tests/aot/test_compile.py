"""The kernels compile for devices that are not here; their cycles are counted; the script says what fails."""

import pytest

from pallas_kernels.aot.cases import TARGET
from pallas_kernels.aot.compiler import Compiler, can_compile
from scripts import aot_kernels

pytestmark = pytest.mark.aot

# A few of `scripts/aot_kernels.py`'s cases, which compiles all.
SUBSET = (
    ("flash_attention", "prefill 4x256 H128 bfloat16"),
    ("paged_attention", "decode 8 context 512 H128 bfloat16"),
    ("paged_attention", "decode 8 context 512 H64 bfloat16 kv int8"),
    ("kv_update", "decode 8 H128 bfloat16 into bfloat16"),
    ("kv_update", "chunk 2x128 H128 bfloat16 into float8_e4m3fn"),
    ("grouped_matmul", "8 tokens qwen3-30b-a3b gate_up int8"),
)
# Where that chip's compiler lets a kernel's loops depend on what a vector register held, which is not simulated.
UNCOUNTED = {("v5p", "grouped_matmul")}


def need(device: str) -> None:
    if not can_compile(aot_kernels.DEVICES[device]):
        pytest.skip(f"the compiler for {device} is not installed: the aot extra has it")


@pytest.mark.parametrize("device", aot_kernels.DEVICES)
def test_kernels_compile(device):
    need(device)
    implementation = "gpu" if device == "h100" else "tpu"
    with Compiler(aot_kernels.DEVICES[device], timeout=120) as compiler:
        for operation, case in SUBSET:
            compiled = compiler.compile(TARGET, operation, "sweep", case, implementation)
            kernels = [kernel for kernel in compiled.kernels if kernel.pallas]
            assert kernels, f"{operation} {case}: no kernel in the program"
            if implementation == "tpu":
                counted = all(kernel.cycles for kernel in kernels) or (device, operation) in UNCOUNTED
                assert counted, f"{operation} {case}: cycles not counted"
                assert all(kernel.memory["vmem"] < 64 * 2**20 for kernel in kernels)
            else:
                assert all(kernel.memory["shared"] <= 227 * 1024 for kernel in kernels)


@pytest.mark.parametrize("device", ["v6e", "tpu7x"])
def test_dynamic_loops_are_counted(device):
    need(device)
    with Compiler(aot_kernels.DEVICES[device]) as compiler:
        few, many = (compiler.compile("tests.aot.counted:loop", turns).kernel() for turns in (8, 24))
    loops = [name for name in many.trips if name.startswith("L")]
    assert len(loops) == 1
    # On some devices a loop is entered once more to find that it has ended.
    assert few.trips[loops[0]] - 8 == many.trips[loops[0]] - 24 in (0, 1)
    skipped = [count for name, count in many.trips.items() if name.startswith("I") and 0 < count < 1]
    assert any(count == pytest.approx(0.5, abs=0.03) for count in skipped)
    assert few.cycles
    assert many.cycles
    turn = (many.cycles - few.cycles) / 16
    assert 20 < turn < 400  # an addition, and every other turn four exponentials one after another


def test_the_table_and_the_exit_status(tmp_path, capsys):
    need("v6e")
    table = tmp_path / "table.md"
    arguments = ["--device", "v6e", "--op", "tests.aot.broken", "--out", str(table)]
    assert aot_kernels.main(arguments) == 1
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.read_text().splitlines()
            if line.startswith(("| device", "| v6e"))]
    header = next(row for row in rows if row == list(aot_kernels.HEADER))
    results = {row[header.index("case")]: row for row in rows if len(row) == len(header) and row != header}
    assert set(results) == {"sound", "sorts", "plain"}
    assert results["sound"][-1] == "ok"
    for column in ("compile s", "VMEM or shared KiB", "cycles", "spills"):
        assert float(results["sound"][header.index(column)]) >= 0
    assert results["sorts"][-1].startswith("FAILED")
    assert "sort" in results["sorts"][-1]
    assert results["plain"][-1].startswith("FAILED: no kernel")
    assert "sorts" in capsys.readouterr().err
    assert aot_kernels.main([*arguments, "--match", "sound"]) == 0
