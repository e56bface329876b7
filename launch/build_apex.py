"""Compiles the one extension of NVIDIA Apex that Megatron Core uses, which adds a weight's gradient in the matrix product.

    python launch/build_apex.py APEX_CHECKOUT OUTPUT_FOLDER    # a wheel of fused_weight_gradient_mlp_cuda

The Python package ``apex`` is left out on purpose: where it can be imported, Megatron Core takes norms and optimizers from it.
Run it with the environment whose torch it is for. ``TORCH_CUDA_ARCH_LIST`` names the GPUs (9.0, Hopper, if it is not set).
"""

import os
import sys
from pathlib import Path

NAME = "fused_weight_gradient_mlp_cuda"
SOURCES = ("dense.cpp", "dense_cuda.cu", "dense_16bit_prec_cuda.cu")
VERSION = "0.1"  # Apex's own, which has not changed since 2019: the commit says more


def main(checkout: str, output: str) -> None:
    output = str(Path(output).absolute())
    os.chdir(checkout)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    from setuptools import setup
    from torch.utils.cpp_extension import BuildExtension, CUDAExtension

    extension = CUDAExtension(
        NAME,
        [f"csrc/megatron/fused_weight_gradient_{name}" for name in SOURCES],
        include_dirs=[os.path.abspath("csrc")],  # ninja compiles in another folder
        extra_compile_args={
            "cxx": ["-O3"],
            # torch switches these conversions off for its own kernels; Apex's are written with them.
            "nvcc": ["-O3", "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__", "--expt-relaxed-constexpr"],
        },
    )
    setup(
        name=NAME,
        version=VERSION,
        py_modules=[],
        ext_modules=[extension],
        cmdclass={"build_ext": BuildExtension},
        script_args=["bdist_wheel", "--dist-dir", output],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
