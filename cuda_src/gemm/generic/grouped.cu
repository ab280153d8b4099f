#include "../../ptx/matrix.cuh"
#include "grouped.cuh"
