/* All kernels of the library, as one module: each is loaded by one call, before the first transfer. */
#include "unpack.cu"
#include "persistent_copy.cu"
