# SPDX-License-Identifier: Apache-2.0
"""usage: find.py [--cuda MAJOR] [DIRECTORY]...

Prints where cuDNN is: its library, then the directories of headers of its frontend, of it and of CUDA that no
compiler knows, divided by semicolons. Looks at Python packages, those in the directories and those of the Python that runs it, then at
the system's paths. Exits with 1 and says what is missing. With --cuda takes a cuDNN that was built for this major
version of CUDA, which it asks the library for, and leaves CUDA's own headers to the compiler.
"""

import pathlib
import subprocess
import sys
import sysconfig

ARGUMENTS = sys.argv[1:]
MAJOR = int(ARGUMENTS[1]) if ARGUMENTS[:1] == ["--cuda"] else None
PACKAGES = [pathlib.Path(folder) for folder in ARGUMENTS[2 if MAJOR else 0:]]
PACKAGES += [pathlib.Path(sysconfig.get_paths()[name]) for name in ("purelib", "platlib")]
SYSTEM = [pathlib.Path("/usr/local/cuda"), pathlib.Path("/usr")]
ASK = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).cudnnGetCudartVersion() // 1000)"
OTHER = []  # libraries for another version of CUDA


def usable(file):
    if not file.is_file():
        return False
    if MAJOR is None or file.name != "libcudnn.so.9":
        return True
    # In a process of its own: one that has loaded a cuDNN takes its parts for the next.
    asked = subprocess.run([sys.executable, "-c", ASK, str(file)], capture_output=True, text=True)
    version = asked.stdout.strip()
    if version != str(MAJOR):
        OTHER.append(f"{file} is for CUDA {version}, not {MAJOR}" if version else f"{file} cannot be loaded")
    return version == str(MAJOR)


def first(file, *places):
    for place in places:
        if usable(place / file):
            return place
    sys.exit(f"no {file} in {', '.join(map(str, places))}" + "".join(f"; {each}" for each in OTHER))


def below(*folders):
    return [package / folder for package in PACKAGES for folder in folders] + [root / "include" for root in SYSTEM]


libraries = first("libcudnn.so.9", *[package / "nvidia/cudnn/lib" for package in PACKAGES],
                  *[root / lib for root in SYSTEM for lib in ("lib64", "lib", "lib/x86_64-linux-gnu")])
includes = [first("cudnn_frontend.h", *below("include")),
            first("cudnn.h", libraries.parent / "include", *below("nvidia/cudnn/include"),
                  pathlib.Path("/usr/include/x86_64-linux-gnu"))]
if MAJOR is None:
    includes.append(first("cuda_runtime_api.h", *below("nvidia/cu13/include", "nvidia/cuda_runtime/include")))
# The frontend includes it. A compiler of CUDA may have it as well, and takes its own.
nvrtc = below(f"nvidia/cu{MAJOR or 13}/include", "nvidia/cuda_nvrtc/include")
if MAJOR is None or any((place / "nvrtc.h").is_file() for place in nvrtc):
    includes.append(first("nvrtc.h", *nvrtc))
# cuDNN looks it up while it makes plans, and ends the process where there is none.
places = [root / lib for root in SYSTEM for lib in ("lib64", "lib", "lib/x86_64-linux-gnu")]
if libraries.parts[-3:] == ("nvidia", "cudnn", "lib"):
    places = [libraries.parent.parent / folder for folder in ("cu13/lib", "cublas/lib")]
if not any(found for place in places for found in place.glob("libcublasLt.so.*")):
    sys.exit("no libcublasLt.so for cuDNN")
print(libraries / "libcudnn.so.9")
# Compilers look there by themselves, and after their own directories.
OWN = [pathlib.Path("/usr/include"), pathlib.Path("/usr/include/x86_64-linux-gnu")]
print(";".join(str(place) for place in dict.fromkeys(includes) if place not in OWN))
