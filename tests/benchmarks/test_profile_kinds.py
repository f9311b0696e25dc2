"""A profile's pieces by kind."""

import pytest
from profile_kinds import (
    ATTENTION,
    CLIPPING,
    COPIES,
    DATA,
    ELEMENTWISE,
    GAPS,
    HEAD_1,
    HEAD_2,
    HEAD_ROWS,
    MATMULS,
    OPTIMIZER,
    by_kind,
    kind_of,
    table,
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", MATMULS),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", MATMULS),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>", MATMULS),
        ("triton_tem_fused_mm_3", MATMULS),
        ("aten::addmm", MATMULS),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", ATTENTION),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", ATTENTION),
        ("triton_tem_fused_flex_attention_0", ATTENTION),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", ATTENTION),
        ("_losses_kernel", HEAD_ROWS),
        ("_gradient_kernel", HEAD_ROWS),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>", OPTIMIZER),
        ("aten::_fused_adamw_", OPTIMIZER),
        ("void at::native::multi_tensor_apply_kernel<LpNormFunctor<float>>", CLIPPING),
        ("Memcpy HtoD (Pinned -> Device)", DATA),
        ("Memcpy DtoD (Device -> Device)", COPIES),
        ("void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda>", COPIES),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", ELEMENTWISE),
        ("triton_poi_fused_mul_silu_1", ELEMENTWISE),
        ("triton_red_fused__scaled_mm_abs_amax_clamp_div_3", ELEMENTWISE),
        ("aten::silu", ELEMENTWISE),
    ],
)
def test_kernels_are_known_by_their_names(name, kind):
    assert kind_of(name) == kind


def test_a_range_says_more_than_a_name_but_for_row_kernels():
    gemm = "nvjet_tst_128x256"
    assert kind_of(gemm, [HEAD_1]) == HEAD_1
    assert kind_of(gemm, ["something else", HEAD_2]) == HEAD_2
    assert kind_of("_losses_kernel", [HEAD_1]) == HEAD_ROWS
    assert kind_of("elementwise_kernel", ["Optimizer.step#AdamW.step"]) == OPTIMIZER


def event(cat, name, start, length, tid=1, **args):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": start,
        "dur": length,
        "tid": tid,
        "args": args,
    }


def test_kernels_belong_to_the_range_that_launched_them_and_gaps_are_what_is_left():
    trace = {
        "traceEvents": [
            event("user_annotation", HEAD_1, 0, 100),
            event("cuda_runtime", "cudaLaunchKernel", 50, 5, correlation=1),
            event("cuda_runtime", "cudaLaunchKernel", 150, 5, correlation=2),
            event("cuda_runtime", "cudaLaunchKernel", 60, 5, tid=2, correlation=3),
            event("kernel", "nvjet_a", 1000, 3000, tid=7, correlation=1),
            event("kernel", "nvjet_b", 3000, 2000, tid=8, correlation=2),
            event("kernel", "triton_poi_fused_mul", 6000, 1000, tid=7, correlation=3),
            {"ph": "M", "name": "process_name"},
        ]
    }
    found, whole = by_kind(trace)
    assert whole == pytest.approx(6.0)
    assert found[HEAD_1].milliseconds == pytest.approx(3.0)
    assert found[MATMULS].milliseconds == pytest.approx(2.0)
    assert found[ELEMENTWISE].milliseconds == pytest.approx(1.0)  # another thread: not in the range
    assert found[GAPS].milliseconds == pytest.approx(1.0)
    rows = {row["kind"]: row for row in table(found, whole, steps=2)}
    assert rows[HEAD_1]["ms a step"] == pytest.approx(1.5)
    assert rows["all"]["ms a step"] == pytest.approx(3.0)


def test_without_a_device_operators_count_for_themselves():
    trace = {
        "traceEvents": [
            event("cpu_op", "aten::linear", 0, 1000),
            event("cpu_op", "aten::mm", 100, 800),
            event("cpu_op", "aten::silu", 2000, 500),
        ]
    }
    found, whole = by_kind(trace)
    assert whole == pytest.approx(2.5)
    assert found[MATMULS].milliseconds == pytest.approx(0.8)
    assert found[ELEMENTWISE].milliseconds == pytest.approx(0.7)
    assert found[GAPS].milliseconds == pytest.approx(1.0)
