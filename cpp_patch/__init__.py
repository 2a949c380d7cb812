"""Everything that becomes C, C++ or CUDA: the generator, the patch series, and what applies it."""
