"""What a list in pyproject.toml would repeat: the packages, and the sources of the C library."""

from glob import glob

from setuptools import Extension, find_packages, setup

NATIVE = "rmm_linear/backends/native"

# A library that ctypes loads, not a Python module; without a C compiler, plain PyTorch takes its place. A level is the
# whole library for one generation of processors, which includes the other files.
library = Extension(
    "rmm_linear.backends.native._library",
    sources=sorted(glob(f"{NATIVE}/level_*.c")),
    depends=sorted(glob(f"{NATIVE}/*.[ch]")),
    extra_compile_args=["-O3", "-std=gnu11", "-ffp-contract=off", "-fopenmp", "-Wno-psabi"],
    extra_link_args=["-fopenmp", "-lm"],  # of the name that PyTorch loads its own under, so that both share its threads
    optional=True,
)

# The kernels are a project of their own (kernels/build.toml), whose folder has another name.
setup(
    packages=[*find_packages(include=["glue_finetune*", "rmm_linear*"]), "rmm_linear.kernels"],
    package_dir={"rmm_linear.kernels": "kernels/torch-ext/rmm_kernels"},
    ext_modules=[library],
)
