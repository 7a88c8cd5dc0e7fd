"""Read what PTX and ptxas say of kernels, and count how many blocks of one fit on a multiprocessor."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks import machine_code
from benchmarks.launches import Launch

PTX = """
.target sm_90a
.visible .entry scores(
	.param .u64 scores_param_0
)
.reqntid 128, 1, 1
{
	bar.sync 	0;
	shfl.sync.bfly.b32 	%r1, %r2, 16, 31, -1;
	shfl.sync.idx.b32 	%r1, %r2, 0, 31, -1;
	barrier.sync 	1, 64;
	mbarrier.init.shared::cta.b64 	[%r3], 1;
}
.visible .entry attention_mosaic_gpu_kernel(
)
.maxntid 64, 2
{
	bar.sync 	0;
}
"""
TOLD = """
ptxas info    : Compiling entry function 'scores' for 'sm_90a'
ptxas info    : Function properties for scores
    8 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
ptxas info    : Compiling entry function 'attention_mosaic_gpu_kernel' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 105 registers, used 2 barriers, 17 bytes smem
"""


def test_ptx_has_threads_barriers_and_shuffles():
    assert machine_code.of_ptx(PTX) == [("scores", (128, 2, 2)), ("attention_mosaic_gpu_kernel", (128, 1, 0))]


def test_ptxas_tells_registers_spills_and_shared_memory():
    assert machine_code.of_assembler(TOLD) == [("scores", (255, 32, 0)), ("attention_mosaic_gpu_kernel", (105, 0, 17))]


def test_a_kernel_of_mosaic_is_known_after_it_was_compiled_once(tmp_path):
    launch = "gpu.launch dynamic_shared_memory_size %c56344_i32 {"
    (tmp_path / "attention_0.before_layout_inference.txt").write_text(launch)
    found = [Launch("kernel attention", "x", 1, True, None, 0, "Mosaic", "hash")]
    known: machine_code.Mosaic = {}
    (kernel,) = machine_code.mosaic_kernels(found, tmp_path, PTX + TOLD, known)
    assert kernel == ("attention", "Mosaic", 105, 0, 17 + 56_344, 128, 1, 0) and kernel.record()["blocks"] == 4
    assert machine_code.mosaic_kernels(found, tmp_path, "", known) == [kernel]


def test_registers_come_in_units_and_a_block_takes_a_kibibyte_of_shared_memory():
    assert machine_code.blocks(255, 256, 0) == 1 and machine_code.blocks(128, 256, 0) == 2
    assert machine_code.blocks(32, 32, 113 * 1024) == 2 and machine_code.blocks(32, 32, 113 * 1024 + 1) == 1
    assert machine_code.blocks(16, 32, 0) == 32 and machine_code.blocks(16, 1024, 0) == 2


@given(st.integers(16, 255), st.integers(1, 8), st.integers(0, 227 * 1024))
def test_more_of_anything_never_lets_more_blocks_fit(registers, warps, shared):
    fitting = machine_code.blocks(registers, 32 * warps, shared)
    assert 1 <= fitting <= 32
    assert fitting * 32 * warps * registers <= 65_536 and fitting * shared <= 227 * 1024
    assert machine_code.blocks(registers + 1, 32 * warps, shared) <= fitting
    assert machine_code.blocks(registers, 32 * warps + 32, shared) <= fitting
    assert machine_code.blocks(registers, 32 * warps, shared + 1024) <= fitting
