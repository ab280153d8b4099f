#include "../../ptx/matrix.cuh"
#include "decode.cuh"
