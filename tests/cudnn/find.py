# SPDX-License-Identifier: Apache-2.0
"""usage: find.py [DIRECTORY]...

Prints where cuDNN is: its library, then the directories of headers of its frontend, of it and of CUDA, divided
by semicolons. Looks at Python packages, those in the directories and those of the Python that runs it, then at
the system's paths. Exits with 1 and says what is missing.
"""

import pathlib
import sys
import sysconfig

PACKAGES = [pathlib.Path(folder) for folder in sys.argv[1:]] + [pathlib.Path(sysconfig.get_paths()[name]) for name in ("purelib", "platlib")]
SYSTEM = [pathlib.Path("/usr/local/cuda"), pathlib.Path("/usr")]


def first(file, *places):
    for place in places:
        if (place / file).is_file():
            return place
    sys.exit(f"no {file} in {', '.join(map(str, places))}")


def below(*folders):
    return [package / folder for package in PACKAGES for folder in folders] + [root / "include" for root in SYSTEM]


includes = [first("cudnn_frontend.h", *below("include")),
            first("cudnn.h", *below("nvidia/cudnn/include"), pathlib.Path("/usr/include/x86_64-linux-gnu")),
            first("cuda_runtime_api.h", *below("nvidia/cu13/include", "nvidia/cuda_runtime/include"))]
libraries = first("libcudnn.so.9", *[package / "nvidia/cudnn/lib" for package in PACKAGES],
                  *[root / lib for root in SYSTEM for lib in ("lib64", "lib", "lib/x86_64-linux-gnu")])
print(libraries / "libcudnn.so.9")
print(";".join(map(str, dict.fromkeys(includes))))
