"""Fetches llama.cpp and the models, patches, compiles and packs: what `kvfmt build` runs.

    fetch.py    downloads into the cache, checked by sha256
    models.py   the GGUF files
    pins.py     the supported llama.cpp versions
    tree.py     build/<pin>/pristine and build/<pin>/src
    compile.py  CMake and ninja
    flags.py    what CMake is told of every build
    toolkit.py  an installed CUDA toolkit
    cuda.py     GPU architectures, and what our kernels cost to compile
    wheel.py    llama-cpp-python around the same libraries
    corpus.py   texts out of the pristine tree
"""
